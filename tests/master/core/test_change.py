"""One change: what follows from an event for trials, the search and the slots."""

from __future__ import annotations

import pytest

from tests.master.fakes import Master
from zero_trial.master.core import change as subject
from zero_trial.master.core import search
from zero_trial.master.store import trials

GRID = {"name": "grid", "metric": "val", "max_concurrent_trials": 2}
FOUR = {"a": {"type": "categorical", "vals": [1, 2, 3, 4]}}


def test_a_single_trial_from_creation_to_completion(master: Master) -> None:
    made = master.create()
    order = master.run_of(1)
    assert order.allocation.slots == (0,) and order.hparams == {"a": 1} and order.token
    assert (order.steps_completed, order.latest_checkpoint, order.allocation.run_id) == (0, None, 1)
    master.validate(1, 0.5)
    master.exit(1)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"])
    assert master.cluster.experiments.get(made.id).best_metric == 0.5


def test_a_grid_runs_as_many_at_once_as_there_are_slots_and_to_its_end(master: Master) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    seen = []
    while master.runs():
        assert len(master.runs()) <= 2
        trial_id = master.runs()[0].allocation.trial_id
        seen.append(master.run_of(trial_id).hparams["a"])
        master.validate(trial_id, 1.0)
        master.exit(trial_id)
    assert sorted(seen) == [1, 2, 3, 4]
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"] * 4)


def test_a_crash_is_tried_again_and_then_an_error(master: Master) -> None:
    made = master.create(max_restarts=2)
    for run in (1, 2, 3):
        assert master.run_of(1).allocation.run_id == run
        master.exit(1, code=3)
    assert master.states(made.id) == ("ERROR", ["ERROR"])
    assert master.cluster.trials.get(1).restarts == 2
    assert "exit code 3" in master.cluster.trials.get(1).reason
    assert "exit code 3" in master.cluster.experiments.get(made.id).error


def test_crashing_trials_do_not_stop_a_sweep(master: Master) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR, max_restarts=0)
    while master.runs():
        trial_id = master.runs()[0].allocation.trial_id
        if trial_id == 2:
            master.exit(trial_id, code=1)
        else:
            master.validate(trial_id, 1.0)
            master.exit(trial_id)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED", "ERROR", "COMPLETED", "COMPLETED"])


def test_a_trial_whose_metric_never_comes_does_not_hang_a_search(master: Master) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    while master.runs():
        master.exit(master.runs()[0].allocation.trial_id)
    assert master.cluster.experiments.get(made.id).state.final


def test_a_validation_without_the_searchers_metric_ends_an_asha_trial_as_failed(master: Master) -> None:
    asha = {"name": "adaptive_asha", "metric": "val", "max_trials": 2, "max_time": 16, "time_metric": "batches"}
    master.create(searcher=asha, hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}})
    run = master.run_of(1).allocation
    master.cluster.trials.report_metrics(1, run_id=1, group="validation", steps_completed=1, metrics={"other": 1})
    assert run.id in master.workers.killed
    master.exit(1, code=137)
    assert master.state(1) == "ERROR"
    assert len(master.cluster.experiments.trials(1)) > 1  # the search goes on


def test_hyperparameters_that_the_trial_refuses_are_told_to_the_search(master: Master) -> None:
    random = {"name": "random", "metric": "val", "max_trials": 2, "max_concurrent_trials": 1}
    made = master.create(searcher=random, hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}})
    master.cluster.trials.early_exit(1, "EXITED_REASON_INVALID_HP")
    master.exit(1)
    for trial_id in (2, 3):  # the refused one does not count
        master.validate(trial_id, 1.0)
        master.exit(trial_id)
    assert master.states(made.id) == ("COMPLETED", ["ERROR", "COMPLETED", "COMPLETED"])


def test_points_that_cannot_be_reconciled_are_pruned_counted_and_explained(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.pruning, "reason", lambda config, hparams, files: "odd" if hparams["a"] % 2 else None)
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    while master.runs():
        trial_id = master.runs()[0].allocation.trial_id
        master.validate(trial_id, 1.0)
        master.exit(trial_id)
    ended = master.cluster.experiments.get(made.id)
    assert (ended.state.value, ended.num_trials, ended.pruned_trials) == ("COMPLETED", 4, 2)
    pruned = [trial for trial in master.cluster.experiments.trials(made.id) if trial.pruned]
    assert all(trial.state.value == "ERROR" and "odd" in trial.reason and trial.run_id == 0 for trial in pruned)
    from zero_trial.master.verbs import LogQuery

    line = next(iter(master.cluster.trials.logs(pruned[0].id, LogQuery())))
    assert line is not None and "odd" in line.message and line.level == "ERROR"


def test_a_search_of_nothing_but_refused_points_is_given_up(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.pruning, "reason", lambda config, hparams, files: "never")
    monkeypatch.setattr(subject, "MAX_PRUNED", 5)
    random = {"name": "random", "metric": "val", "max_trials": 2}
    made = master.create(searcher=random, hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}})
    ended = master.cluster.experiments.get(made.id)
    assert ended.state.value == "ERROR" and "never" in ended.error and ended.pruned_trials == 5
    assert search.MAX_PRUNED > 5


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


def test_a_change_that_fails_changes_nothing(master: Master) -> None:
    made = master.create()
    with pytest.raises(RuntimeError), master.hub.change() as change:
        trials.change(change.connection, 1, reason="half")
        raise RuntimeError("in the middle")
    assert master.cluster.trials.get(1).reason == ""
    assert master.states(made.id) == ("ACTIVE", ["ACTIVE"])


def test_a_search_that_fails_ends_its_experiment_and_nothing_else(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero_trial.master.searchers.grid_search import GridSearch

    other = master.create()
    made = master.create(searcher=GRID, hyperparameters=FOUR)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(GridSearch, "on_validation", fail)
    master.validate(2, 1.0)
    assert master.workers.killed == [master.run_of(2).allocation.id]
    master.exit(2, code=137)
    master.exit(1)
    assert master.states(other.id)[0] == "COMPLETED"
    found = master.cluster.experiments.get(made.id)
    assert found.state.value == "ERROR" and "a fault of ours" in found.error


def test_a_point_that_cannot_be_looked_at_is_launched(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(subject.pruning, "reason", fail)
    master.create()
    assert len(master.runs()) == 1
