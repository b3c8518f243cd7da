"""Experiments, trials, checkpoints, users and tokens in the store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from zero_trial.master.records import (
    Allocation,
    AllocationState,
    Checkpoint,
    CheckpointState,
    Experiment,
    ExperimentState,
    MetricReport,
    Trial,
    TrialState,
    User,
)
from zero_trial.master.store import Database, account_rows, checkpoint_rows, experiment_rows, metric_rows, trial_rows


def put(connection: sqlite3.Connection, **changes: Any) -> int:
    config = {"searcher": {"metric": "val", "smaller_is_better": changes.pop("smaller", True)}}
    values: dict[str, Any] = {
        "id": 0,
        "state": ExperimentState.ACTIVE,
        "config": config,
        "original_config": "x: 1",
        "owner": "ada",
    }
    values |= {"job_id": "j", "created": 1.0, "name": "n", "labels": ("a", "b")} | changes
    return experiment_rows.add(connection, Experiment(**values), b"tgz")


def put_trial(connection: sqlite3.Connection, experiment_id: int, name: str, value: float | None = None) -> int:
    number = trial_rows.add(
        connection, Trial(0, experiment_id, name, f"{experiment_id}.{name}", TrialState.ACTIVE, {}, 1, 2.0)
    )
    if value is not None:
        metric_rows.add(connection, MetricReport(number, 1, "validation", 1, {"val": value}), value)
    return number


def test_there_and_back(connection: sqlite3.Connection) -> None:
    number = put(connection, description="d", notes="m", parent_id=7)
    found = experiment_rows.get(connection, number)
    assert found is not None
    assert (found.owner, found.labels, found.description, found.notes, found.parent_id) == (
        "ada",
        ("a", "b"),
        "d",
        "m",
        7,
    )
    assert found.shown_state == "ACTIVE" and found.best_metric is None and found.num_trials == 0
    assert experiment_rows.context(connection, number) == b"tgz" and experiment_rows.get(connection, 99) is None
    assert [item.id for item in experiment_rows.all_(connection)] == [number]


@pytest.mark.parametrize(("smaller", "best"), [(True, (2, 0.1)), (False, (1, 0.9))])
def test_the_best_trial(connection: sqlite3.Connection, smaller: bool, best: tuple[int, float]) -> None:
    number = put(connection, smaller=smaller)
    for name, value in (("a", 0.9), ("b", 0.1), ("c", None)):
        put_trial(connection, number, name, value)
    found = experiment_rows.get(connection, number)
    assert found is not None and (found.best_trial_id, found.best_metric) == best and found.num_trials == 3


def test_states_chores_and_snapshots(connection: sqlite3.Connection) -> None:
    first, second = put(connection), put(connection, state=ExperimentState.PAUSED)
    experiment_rows.change(connection, first, collect=1, snapshot={"a": [1]}, state=ExperimentState.COMPLETED)
    found = experiment_rows.in_states(connection, ExperimentState.PAUSED, ExperimentState.COMPLETED)
    assert [each.id for each in found] == [first, second]
    assert experiment_rows.to_collect(connection) == [first]
    assert (
        experiment_rows.snapshot(connection, first) == {"a": [1]} and experiment_rows.snapshot(connection, second) == {}
    )


def test_nothing_is_left_of_one_that_is_erased(connection: sqlite3.Connection) -> None:
    first, second = put(connection), put(connection)
    put_trial(connection, first, "a", 1.0)
    kept = put_trial(connection, second, "b", 1.0)
    connection.execute("INSERT INTO marks SELECT trial_id, grp, steps, newest, summary FROM summaries")
    experiment_rows.erase(connection, first)
    assert experiment_rows.get(connection, first) is None and experiment_rows.context(connection, first) is None
    assert trial_rows.of_experiment(connection, first) == []
    for table in ("metrics", "summaries", "marks", "points"):
        assert [row[0] for row in connection.execute(f"SELECT DISTINCT trial_id FROM {table}")] == [kept]
    assert put(connection) > second  # numbers are not used again


def run(trial_id: int, number: int) -> Allocation:
    return Allocation(f"1.t.{number}", trial_id, 1, "1.t", number, AllocationState.QUEUED, (), float(number), "r", "c")


def test_trials(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiment = put(connection)
        first, second = put_trial(connection, experiment, "a", 0.5), put_trial(connection, experiment, "b")
        trial_rows.change(connection, second, state=TrialState.ERROR, reason="why", metadata={"k": 1}, early_exit="X")
        assert [item.id for item in trial_rows.live(connection, experiment)] == [first]
        assert [item.id for item in trial_rows.of_experiment(connection, experiment)] == [first, second]
        found = trial_rows.get(connection, first, derived=True)
        assert (
            found is not None
            and found.searcher_metric == 0.5
            and found.summary_metrics["validation"]["val"]["count"] == 1
        )
        by_request = trial_rows.of_request(connection, experiment, "b")
        by_task = trial_rows.of_task(connection, f"{experiment}.b")
        assert (
            by_request is not None
            and by_task is not None
            and by_request.id == by_task.id == second
            and by_task.reason == "why"
        )
        assert trial_rows.metadata(connection, second) == {"k": 1} and trial_rows.early_exit(connection, second) == "X"
        assert trial_rows.get(connection, 99) is None and trial_rows.early_exit(connection, 99) == ""
    database.close()


def test_allocations(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        for number in (1, 2):
            trial_rows.add_allocation(connection, run(5, number))
        trial_rows.change_allocation(
            connection, "1.t.1", state=AllocationState.TERMINATED, ended=3.0, started=1.0, exit_code=9
        )
        trial_rows.change_allocation(
            connection, "1.t.2", state=AllocationState.RUNNING, slots=(1, 3), preempt=1, deadline=10.0, killing=1
        )
        assert [item.id for item in trial_rows.allocations(connection)] == ["1.t.2"]
        assert [item.exit_code for item in trial_rows.allocations(connection, trial_id=5)] == [9, None]
        newest = trial_rows.newest_allocation(connection, 5)
        assert newest is not None and newest.slots == (1, 3) and newest.preempt and not newest.acked
        assert trial_rows.overdue(connection, 9.9) == [] and [
            item.id for item in trial_rows.overdue(connection, 10.0)
        ] == ["1.t.2"]
        assert trial_rows.killing(connection, "1.t.2") and not trial_rows.killing(connection, "1.t.1")
        assert trial_rows.allocation(connection, "x") is None
    database.close()


def saved(name: str, trial_id: int, steps: int, at: float) -> Checkpoint:
    return Checkpoint(
        name, CheckpointState.COMPLETED, trial_id, 1, "t", "t.1", at, {"steps_completed": steps}, {"w": 3}, 3, steps
    )


def test_checkpoints(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiment = put(connection)
        trial = put_trial(connection, experiment, "a", 0.5)
        for name, steps, at in (("one", 1, 1.0), ("two", 2, 2.0), ("late", 1, 3.0)):
            checkpoint_rows.put(connection, saved(name, trial, steps, at))
        checkpoint_rows.put(connection, saved("two", trial, 2, 2.0))  # said twice
        assert [item.uuid for item in checkpoint_rows.of_trial(connection, trial)] == ["one", "late", "two"]
        assert [item.uuid for item in checkpoint_rows.of_experiment(connection, experiment)] == ["one", "two", "late"]
        newest = checkpoint_rows.latest(connection, trial)
        assert newest is not None and newest.uuid == "late"  # a run that went back wrote it last
        found = checkpoint_rows.get(connection, "one")
        assert found is not None and found.searcher_metric == 0.5 and found.validation_metrics == {"val": 0.5}
        checkpoint_rows.mark_deleted(connection, ["late", "no one"])
        assert [item.uuid for item in checkpoint_rows.marked_deleted(connection)] == ["late"]
        newest = checkpoint_rows.latest(connection, trial)
        assert newest is not None and newest.uuid == "two"
        checkpoint_rows.change(connection, "late", state=CheckpointState.DELETED, doomed=0)
        checkpoint_rows.mark_deleted(connection, ["late"])
        assert checkpoint_rows.marked_deleted(connection) == []
        assert checkpoint_rows.get(connection, "no one") is None
    database.close()


def test_accounts(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        number = account_rows.add_user(connection, User(0, "ada", True, True, "hash"))
        assert (
            account_rows.user(connection, "ada")
            == account_rows.user_by_id(connection, number)
            == User(number, "ada", True, True, "hash")
        )
        account_rows.change_user(connection, number, admin=False, password="other", display_name="Ada")
        assert account_rows.users(connection) == [User(number, "ada", False, True, "other", "Ada")]
        assert account_rows.user(connection, "no one") is None

        account_rows.add_token(connection, "d1", user_id=number, expires=100.0)
        account_rows.add_token(connection, "d2", allocation_id="a.1")
        assert account_rows.token(connection, "d1", 99.0) == User(number, "ada", False, True, "other", "Ada")
        assert account_rows.token(connection, "d1", 100.0) is None
        assert account_rows.token(connection, "d2", 1e12) == "a.1"
        account_rows.drop_tokens_of(connection, "a.1")
        account_rows.drop_token(connection, "d1")
        assert account_rows.token(connection, "d1", 0.0) is account_rows.token(connection, "d2", 0.0) is None

        assert account_rows.value(connection, "k") is None
        account_rows.set_value(connection, "k", "1")
        account_rows.set_value(connection, "k", "2")
        assert account_rows.value(connection, "k") == "2"

        account_rows.enable_slot(connection, 3, False)
        assert account_rows.disabled_slots(connection) == {3: False}
        account_rows.enable_slot(connection, 3, True)
        assert account_rows.disabled_slots(connection) == {}
    database.close()
