"""Runs: where they start, who is next, and that all come to an end."""

from __future__ import annotations

from tests.master.fakes import Master


def test_a_run_starts_from_the_newest_checkpoint_and_what_came_after_it_is_archived(master: Master) -> None:
    from tests.master.core.test_checkpoints import save

    master.create()
    trials_ = master.cluster.trials
    for step in (1, 2, 3):
        trials_.report_metrics(1, run_id=1, group="training", steps_completed=step, metrics={"loss": step})
    save(master, 1, steps=2)
    master.exit(1, code=1)
    order = master.run_of(1)
    assert order.steps_completed == 2 and order.latest_checkpoint is not None and order.allocation.run_id == 2
    assert [report.steps_completed for report in trials_.metrics(1)] == [1, 2]


def test_priority_then_submission_decides_who_is_next(master: Master) -> None:
    whole = {"slots_per_trial": 2}
    master.create(resources=whole)
    master.create(resources=whole)
    master.create(resources={**whole, "priority": 1})
    master.exit(1)
    assert [order.allocation.experiment_id for order in master.runs()] == [3]
    master.exit(3)
    assert [order.allocation.experiment_id for order in master.runs()] == [2]


def test_twenty_experiments_at_once_all_end(master: Master) -> None:
    for _ in range(20):
        master.create()
    while master.runs():
        assert len(master.runs()) <= 2
        master.exit(master.runs()[0].allocation.trial_id)
    assert [item.state.value for item in master.cluster.experiments.all()] == ["COMPLETED"] * 20
