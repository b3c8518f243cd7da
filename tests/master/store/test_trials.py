"""Trials and allocations in the store."""

from __future__ import annotations

from pathlib import Path

from tests.master.store.test_experiments import put, put_trial
from zero_trial.master.records import Allocation, AllocationState, TrialState
from zero_trial.master.store import Database, trials


def run(trial_id: int, number: int) -> Allocation:
    return Allocation(f"1.t.{number}", trial_id, 1, "1.t", number, AllocationState.QUEUED, (), float(number), "r", "c")


def test_trials(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiment = put(connection)
        first, second = put_trial(connection, experiment, "a", 0.5), put_trial(connection, experiment, "b")
        trials.change(connection, second, state=TrialState.ERROR, reason="why", metadata={"k": 1}, early_exit="X")
        assert [item.id for item in trials.live(connection, experiment)] == [first]
        assert [item.id for item in trials.of_experiment(connection, experiment)] == [first, second]
        found = trials.get(connection, first, derived=True)
        assert (
            found is not None
            and found.searcher_metric == 0.5
            and found.summary_metrics["validation"]["val"]["count"] == 1
        )
        by_request = trials.of_request(connection, experiment, "b")
        by_task = trials.of_task(connection, f"{experiment}.b")
        assert (
            by_request is not None
            and by_task is not None
            and by_request.id == by_task.id == second
            and by_task.reason == "why"
        )
        assert trials.metadata(connection, second) == {"k": 1} and trials.early_exit(connection, second) == "X"
        assert trials.get(connection, 99) is None and trials.early_exit(connection, 99) == ""
    database.close()


def test_allocations(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        for number in (1, 2):
            trials.add_allocation(connection, run(5, number))
        trials.change_allocation(
            connection, "1.t.1", state=AllocationState.TERMINATED, ended=3.0, started=1.0, exit_code=9
        )
        trials.change_allocation(
            connection, "1.t.2", state=AllocationState.RUNNING, slots=(1, 3), preempt=1, deadline=10.0, killing=1
        )
        assert [item.id for item in trials.allocations(connection)] == ["1.t.2"]
        assert [item.exit_code for item in trials.allocations(connection, trial_id=5)] == [9, None]
        newest = trials.newest_allocation(connection, 5)
        assert newest is not None and newest.slots == (1, 3) and newest.preempt and not newest.acked
        assert trials.overdue(connection, 9.9) == [] and [item.id for item in trials.overdue(connection, 10.0)] == [
            "1.t.2"
        ]
        assert trials.killing(connection, "1.t.2") and not trials.killing(connection, "1.t.1")
        assert trials.allocation(connection, "x") is None
    database.close()
