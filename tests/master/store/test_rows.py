"""Experiments, trials, checkpoints, users and tokens in the store."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from zero_trial.master.records import (
    Checkpoint,
    CheckpointState,
    Experiment,
    ExperimentState,
    MetricReport,
    Trial,
    TrialState,
)
from zero_trial.master.store import checkpoint_rows, experiment_rows, metric_rows, trial_rows


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


@pytest.mark.parametrize(("smaller", "best"), [(True, (2, 0.1)), (False, (1, 0.9))])
def test_the_best_trial(connection: sqlite3.Connection, smaller: bool, best: tuple[int, float]) -> None:
    number = put(connection, smaller=smaller)
    for name, value in (("a", 0.9), ("b", 0.1), ("c", None)):
        put_trial(connection, number, name, value)
    found = experiment_rows.get(connection, number)
    assert found is not None and (found.best_trial_id, found.best_metric) == best and found.num_trials == 3


def test_nothing_is_left_of_one_that_is_erased(connection: sqlite3.Connection) -> None:
    first, second = put(connection), put(connection)
    put_trial(connection, first, "a", 1.0)
    kept = put_trial(connection, second, "b", 1.0)
    experiment_rows.erase(connection, first)
    assert experiment_rows.get(connection, first) is None and experiment_rows.context(connection, first) is None
    assert trial_rows.of_experiment(connection, first) == []
    for table in ("metrics", "summaries"):
        assert [row[0] for row in connection.execute(f"SELECT DISTINCT trial_id FROM {table}")] == [kept]
    assert put(connection) > second  # numbers are not used again


def saved(name: str, trial_id: int, steps: int, at: float) -> Checkpoint:
    return Checkpoint(
        name, CheckpointState.COMPLETED, trial_id, 1, "t", "t.1", at, {"steps_completed": steps}, {"w": 3}, 3, steps
    )


def test_checkpoints(connection: sqlite3.Connection) -> None:
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
