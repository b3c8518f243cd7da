"""One transaction: what follows from an event, all of it or nothing."""

from __future__ import annotations

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.core.transaction import transaction
from zero_trial.master.store import trials


def test_a_single_trial_from_creation_to_completion(master: Sandbox) -> None:
    made = master.create()
    order = master.run_of(1)
    assert order.allocation.slots == (0,) and order.hparams == {"a": 1} and order.token
    assert (order.steps_completed, order.latest_checkpoint, order.allocation.run_id) == (0, None, 1)
    master.validate(1, 0.5)
    master.exit(1)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"])
    assert master.experiments.get(made.id).best_metric == 0.5


def test_a_crash_is_tried_again_and_then_an_error(master: Sandbox) -> None:
    made = master.create(max_restarts=2)
    for run in (1, 2, 3):
        assert master.run_of(1).allocation.run_id == run
        master.exit(1, code=3)
    assert master.states(made.id) == ("ERROR", ["ERROR"])
    assert master.trials.get(1).restarts == 2
    assert "exit code 3" in master.trials.get(1).reason
    assert "exit code 3" in master.experiments.get(made.id).error


def test_a_change_that_fails_changes_nothing(master: Sandbox) -> None:
    made = master.create()
    with pytest.raises(RuntimeError), transaction(master.state) as tx:
        trials.change(tx.connection, 1, reason="half")
        raise RuntimeError("in the middle")
    assert master.trials.get(1).reason == ""
    assert master.states(made.id) == ("ACTIVE", ["ACTIVE"])


# -- runs


def test_a_run_starts_from_the_newest_checkpoint_and_what_came_after_it_is_archived(master: Sandbox) -> None:
    from tests.master.core.test_checkpoints import save

    master.create()
    trials_ = master.trials
    for step in (1, 2, 3):
        trials_.report_metrics(1, run_id=1, group="training", steps_completed=step, metrics={"loss": step})
    save(master, 1, steps=2)
    master.exit(1, code=1)
    order = master.run_of(1)
    assert order.steps_completed == 2 and order.latest_checkpoint is not None and order.allocation.run_id == 2
    assert [report.steps_completed for report in trials_.metrics(1)] == [1, 2]


def test_priority_then_submission_decides_who_is_next(master: Sandbox) -> None:
    whole = {"slots_per_trial": 2}
    master.create(resources=whole)
    master.create(resources=whole)
    master.create(resources={**whole, "priority": 1})
    master.exit(1)
    assert [order.allocation.experiment_id for order in master.runs()] == [3]
    master.exit(3)
    assert [order.allocation.experiment_id for order in master.runs()] == [2]


def test_twenty_experiments_at_once_all_end(master: Sandbox) -> None:
    for _ in range(20):
        master.create()
    while master.runs():
        assert len(master.runs()) <= 2
        master.exit(master.runs()[0].allocation.trial_id)
    assert [item.state.value for item in master.experiments.all()] == ["COMPLETED"] * 20
