"""Experiments in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zero_trial.master.records import Experiment, ExperimentState, MetricReport, Trial, TrialState
from zero_trial.master.store import Database, experiments, metrics, trials


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    database = Database(tmp_path / "db")
    with database.transaction() as opened:
        yield opened
    database.close()


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
    return experiments.add(connection, Experiment(**values), b"tgz")


def put_trial(connection: sqlite3.Connection, experiment_id: int, name: str, value: float | None = None) -> int:
    number = trials.add(
        connection, Trial(0, experiment_id, name, f"{experiment_id}.{name}", TrialState.ACTIVE, {}, 1, 2.0)
    )
    if value is not None:
        metrics.add(connection, MetricReport(number, 1, "validation", 1, {"val": value}), value)
    return number


def test_there_and_back(connection: sqlite3.Connection) -> None:
    number = put(connection, description="d", notes="m", parent_id=7)
    found = experiments.get(connection, number)
    assert found is not None
    assert (found.owner, found.labels, found.description, found.notes, found.parent_id) == (
        "ada",
        ("a", "b"),
        "d",
        "m",
        7,
    )
    assert found.shown_state == "ACTIVE" and found.best_metric is None and found.num_trials == 0
    assert experiments.context(connection, number) == b"tgz" and experiments.get(connection, 99) is None
    assert [item.id for item in experiments.all_(connection)] == [number]


@pytest.mark.parametrize(("smaller", "best"), [(True, (2, 0.1)), (False, (1, 0.9))])
def test_the_best_trial(connection: sqlite3.Connection, smaller: bool, best: tuple[int, float]) -> None:
    number = put(connection, smaller=smaller)
    for name, value in (("a", 0.9), ("b", 0.1), ("c", None)):
        put_trial(connection, number, name, value)
    found = experiments.get(connection, number)
    assert found is not None and (found.best_trial_id, found.best_metric) == best and found.num_trials == 3


def test_states_chores_and_snapshots(connection: sqlite3.Connection) -> None:
    first, second = put(connection), put(connection, state=ExperimentState.PAUSED)
    experiments.change(connection, first, collect=1, snapshot={"a": [1]}, state=ExperimentState.COMPLETED)
    assert experiments.ids(connection, ExperimentState.PAUSED, ExperimentState.COMPLETED) == [first, second]
    assert experiments.to_collect(connection) == [first]
    assert experiments.snapshot(connection, first) == {"a": [1]} and experiments.snapshot(connection, second) == {}


def test_nothing_is_left_of_one_that_is_erased(connection: sqlite3.Connection) -> None:
    first, second = put(connection), put(connection)
    put_trial(connection, first, "a", 1.0)
    kept = put_trial(connection, second, "b", 1.0)
    experiments.erase(connection, first)
    assert experiments.get(connection, first) is None and experiments.context(connection, first) is None
    assert trials.of_experiment(connection, first) == []
    assert [row[0] for row in connection.execute("SELECT DISTINCT trial_id FROM metrics")] == [kept]
    assert put(connection) > second  # numbers are not used again
