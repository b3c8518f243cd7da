"""Reports of metrics, and their summary."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import nullcontext
from typing import Any

import pytest

from zero_trial.master.records import Checkpoint, CheckpointState, MetricReport, Trial, TrialState
from zero_trial.master.store import checkpoint_rows, metric_rows, trial_rows
from zero_trial.master.store.metric_rows import extend, kind_of


def report(steps: int | None, group: str = "training", run_id: int = 1, **values: Any) -> MetricReport:
    return MetricReport(1, run_id, group, steps, values, reported=5.0)


def of_trial(connection: sqlite3.Connection, *asked: Any, **more: Any) -> list[MetricReport]:
    return list(metric_rows.of_trial(lambda: nullcontext(connection), *asked, **more))


def test_best_and_latest_validation(connection: sqlite3.Connection) -> None:
    for steps, value in ((1, 0.5), (2, 0.2), (3, 0.9)):
        metric_rows.add(connection, report(steps, "validation", val=value), value)
    metric_rows.add(connection, report(4, "validation", other=1), None)
    metric_rows.add(connection, MetricReport(2, 1, "validation", 9, {"val": 0.2}), 0.2)
    metric_rows.add(connection, MetricReport(2, 1, "validation", 8, {"val": 0.2}), 0.2)
    for name in "ab":
        trial_rows.add(connection, Trial(0, 1, name, name, TrialState.ACTIVE, {}, 1, 0.0))
    for which, there in (("= ?", {1: 4}), ("IN (SELECT 1 UNION SELECT ?)", {1: 4, 2: 9})):
        value = max(there)
        best = metric_rows.best_validations(connection, which, value, smaller_is_better=True)
        worst = metric_rows.best_validations(connection, which, value, smaller_is_better=False)
        assert best.keys() == worst.keys() == there.keys()
        assert best[1][1] == 0.2 and worst[1][1] == 0.9
        assert 2 not in there or best[2][0].steps_completed == worst[2][0].steps_completed == 9  # the first of equals
        latest = metric_rows.latest_validations(connection, which, value)
        assert {trial: each.steps_completed for trial, each in latest.items()} == there


def test_validations_at_the_steps_of_checkpoints(connection: sqlite3.Connection) -> None:
    for steps, value in ((1, 0.5), (2, 0.4), (2, 0.2), (3, 0.9)):
        metric_rows.add(connection, report(steps, "validation", val=value), value)
    for steps in (2, 7):
        saved = Checkpoint(f"u{steps}", CheckpointState.COMPLETED, 1, 1, "t", "a", 1.0, {}, {}, steps_completed=steps)
        checkpoint_rows.put(connection, saved)
    found = metric_rows.validations_at_checkpoints(connection, "c.experiment_id = ?", 1)
    assert found == {(1, 2): ({"val": 0.2}, 0.2)}  # of two reports the later
    assert metric_rows.validations_at_checkpoints(connection, "c.uuid = ?", "u7") == {}


def test_what_came_after_the_restored_step_is_out_of_sight(connection: sqlite3.Connection) -> None:
    for steps in (1, 2, 3):
        metric_rows.add(connection, report(steps, "validation", val=-steps), -steps)
    metric_rows.add(connection, report(None, "gpu", load=1))
    metric_rows.archive_after(connection, 1, 2)
    assert [item.steps_completed for item in of_trial(connection, 1, "validation")] == [1, 2]
    trial_rows.add(connection, Trial(0, 1, "a", "a", TrialState.ACTIVE, {}, 1, 0.0))
    assert metric_rows.best_validations(connection, "= ?", 1, smaller_is_better=True)[1][1] == -2
    assert len(of_trial(connection, 1, "gpu")) == 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (2.5, 2.5),
        (math.inf, math.inf),
        (math.nan, None),
        ("1", None),
        ("-Infinity", -math.inf),
        ("NaN", None),
        (True, None),
        (None, None),
        ({}, None),
    ],
)
def test_numbers_to_search_by(value: Any, number: float | None) -> None:
    assert metric_rows.number_of({"val": value}, "val") == number
    assert metric_rows.number_of({}, "val") is None


def fresh(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the summary of trial 1 as the reports alone give it."""
    found: dict[str, Any] = {}
    for item in sorted(of_trial(connection, 1), key=lambda each: each.id):
        if item.steps_completed is not None:
            extend(found.setdefault(item.group, {}), item.metrics)
    return found


def test_the_summary_is_that_of_the_reports_and_written_once_for_many(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps fall, and while an earlier restart is made up for in several parts."""
    monkeypatch.setattr(metric_rows, "_READ_AT_ONCE", 64)
    written: list[str] = []
    connection.set_trace_callback(lambda sql: written.append(sql) if sql.startswith("REPLACE INTO summaries") else None)
    odd: list[Any] = [0.3, "x", math.inf, None, True]
    for count in range(1, 400):
        metric_rows.add(connection, report(400 - count // 2, loss=count / 7, **({"late": 1} if count > 90 else {})))
        if count % 4 == 0:
            metric_rows.add(connection, report(count, "validation", val=odd[count % 5]))
        assert count % 7 or metric_rows.summary(connection, 1) == fresh(connection)
    assert len(written) <= 500 // 32 + 2  # each group stores its first report
    metric_rows.add(connection, report(None, "gpu", load=1))
    for run_id, hide in enumerate(
        (
            lambda: metric_rows.archive_after(connection, 1, 380),
            lambda: metric_rows.archive_repeated(connection, report(300, "validation", run_id=2)),
            lambda: metric_rows.archive_after(connection, 1, 250),
            lambda: metric_rows.archive_after(connection, 1, 0),
        ),
        2,
    ):
        before = metric_rows.summary(connection, 1)
        hide()
        assert metric_rows.summary(connection, 1) == fresh(connection) != before
        for count in range(40):
            metric_rows.add(connection, report(count, run_id=run_id, loss=-1.0))
            assert count % 7 or metric_rows.summary(connection, 1) == fresh(connection)
    metric_rows.keep_summary(connection, 1)
    kept = connection.execute("SELECT summary FROM summaries WHERE trial_id = 1 AND grp = 'training'").fetchone()[0]
    assert json.loads(kept) == fresh(connection)["training"]


@pytest.mark.parametrize("change", [1, -1])
def test_a_report_costs_the_same_whatever_was_reported(connection: sqlite3.Connection, change: int) -> None:
    """Steps may fall, and a run may start again: what it hides is no work for each later report."""
    work: list[int] = []
    for count in range(3000):
        if count == 2000:
            metric_rows.archive_after(connection, 1, 1000)
        work.append(0)
        connection.set_progress_handler(lambda: work.append(work.pop() + 1), 100)
        metric_rows.add(connection, report(1500 + change * count // 2, run_id=1 + count // 2000, loss=count / 7))
        connection.set_progress_handler(None, 0)
    assert sum(work[2500:]) < 1.5 * sum(work[500:1000])  # in hundreds of SQLite's operations
    assert metric_rows.known(connection, report(1500 + change * 950, loss=1900 / 7))  # also what is out of sight


def test_a_whole_number_that_no_float_holds_spoils_nothing(connection: sqlite3.Connection) -> None:
    huge = 10**400
    assert metric_rows.number_of({"m": huge}, "m") == math.inf and metric_rows.number_of({"m": -huge}, "m") == -math.inf
    metric_rows.add(connection, report(1, m=huge))
    metric_rows.add(connection, report(2, m=3))
    found = metric_rows.summary(connection, 1)["training"]["m"]
    assert found["last"] == 3 == found["min"] and found["max"] == found["mean"] == math.inf


def summary(*values: Any) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for value in values:
        extend(found, {"m": value})
    return found["m"]


@pytest.mark.parametrize("nan", [math.nan, "NaN"])
def test_nan_stays_visible(nan: Any):
    found = summary(1.0, nan, 5.0)
    assert (found["count"], found["last"], found["type"]) == (3, 5.0, "number")
    assert all(math.isnan(found[name]) for name in ("min", "max", "sum", "mean"))


def test_infinities():
    found = summary(1.0, "Infinity", 3.0)
    assert (found["min"], found["max"], found["mean"]) == (1.0, math.inf, math.inf)
    found = summary("-Infinity", math.nan)
    assert found["min"] == -math.inf and math.isnan(found["max"])


def test_values_of_two_types_are_text():
    assert summary(1.0, "a") == {"type": "string", "last": "a"}
    assert summary(1.0, "a", 2.0) == {"type": "string", "last": 2.0}


def test_the_last_value_is_that_of_the_newest_report():
    found: dict[str, dict[str, Any]] = {}
    for values in ({"a": 1, "b": 2}, {"a": 3}):
        extend(found, values)
    assert (found["a"]["last"], found["b"]["last"], found["b"]["count"]) == (3, None, 1)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "number"),
        (1.5, "number"),
        ("-Infinity", "number"),
        (True, "boolean"),
        (None, "null"),
        ("x", "string"),
        ("2026-01-31T12:00:00Z", "date"),
        ("2026-01-31", "string"),
        ({}, "object"),
        ([], "array"),
    ],
)
def test_types(value: Any, kind: str):
    assert kind_of(value) == kind and summary(value)["type"] == kind
