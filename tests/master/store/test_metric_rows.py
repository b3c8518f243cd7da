"""Reports of metrics, and their summary."""

from __future__ import annotations

import json
import math
import random
import sqlite3
from contextlib import nullcontext
from typing import Any

import pytest

from zero_trial.master.records import Checkpoint, CheckpointState, MetricReport, Trial, TrialState
from zero_trial.master.store import checkpoint_rows, metric_rows, trial_rows
from zero_trial.master.store.metric_rows import extend, kind_of
from zero_trial.trial.runs.rank_records import is_finite


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
    for group in ("training", "validation"):
        for item in of_trial(connection, 1, group):
            extend(found.setdefault(group, {}), item.metrics)
    return found


def drawn(connection: sqlite3.Connection, group: str = "training") -> dict[str, list[tuple[float, float]]]:
    """Return the points of trial 1 as a reader gets them: those that are kept, and those of the
    reports after them."""
    kept, until = metric_rows.kept_points(connection, 1, group)
    found = {name: list(zip(*points, strict=True)) for name, points in kept.items()}
    for item in of_trial(connection, 1, group):
        if (item.steps_completed, item.id) > until:
            add_points(found, item)
    return {name: points for name, points in found.items() if points}


def add_points(found: dict[str, list[tuple[float, float]]], item: MetricReport) -> None:
    for name, value in item.metrics.items():
        if is_finite(value):
            found.setdefault(name, []).append((float(item.steps_completed or 0), float(value)))


def reported(connection: sqlite3.Connection, group: str = "training") -> dict[str, list[tuple[float, float]]]:
    """Return the points of trial 1 as the reports alone give them."""
    found: dict[str, list[tuple[float, float]]] = {}
    for item in of_trial(connection, 1, group):
        add_points(found, item)
    return found


def test_points_are_kept_of_what_can_be_drawn(connection: sqlite3.Connection) -> None:
    odd: list[Any] = [True, None, "x", "NaN", math.nan, math.inf, 10**400, {"a": 1}, [2], 10**40]
    for count in range(1, 150):
        values = {"loss": count / 7, "odd": odd[count % len(odd)], "\ud800": 1, **({"late": 1} if count > 90 else {})}
        metric_rows.add(connection, report(count // 2 - 3 * (count % 50 == 49), **values))
        metric_rows.add(connection, report(count, "validation", val=count / 3))
        assert count % 20 or drawn(connection) == reported(connection)
    kept, (steps, _) = metric_rows.kept_points(connection, 1, "training")
    assert len(kept["loss"][0]) > 100 and steps > 50
    assert drawn(connection, "validation") == reported(connection, "validation")
    only, _ = metric_rows.kept_points(connection, 1, "training", "\ud800")
    assert only == {"\ud800": kept["\ud800"]}
    metric_rows.archive_after(connection, 1, 40)
    assert drawn(connection) == reported(connection) and drawn(connection)["loss"][-1][0] == 40
    metric_rows.add(connection, report(70, loss=1.0))
    metric_rows.keep_summary(connection, 1)
    assert metric_rows.kept_points(connection, 1, "training")[1][0] == 70
    assert drawn(connection) == reported(connection)


def sizes(connection: sqlite3.Connection, where: str = "") -> tuple[int, int]:
    """Return how many rows of points there are, and how many points."""
    rows, size = connection.execute(f"SELECT count(*), sum(length(points)) FROM points {where}").fetchone()
    return rows, (size or 0) // 16


def test_a_change_reads_only_what_follows_the_mark_before_it(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_rows, "_MARKED_EVERY", 64)
    monkeypatch.setattr(metric_rows, "_PIECE_BYTES", 640)
    chosen, reached = random.Random(7), 0
    for count in range(3000):
        reached += chosen.choice((0, 0, 1, 1, 1, 2))
        metric_rows.add(connection, report(reached, loss=count / 7, **({"odd": count} if count % 3 else {})))
    read: list[str] = []
    monkeypatch.setattr(metric_rows, "loads", lambda text: read.append(text) or json.loads(text))
    for back in (3, 0, 500, 40, 1200):
        reached -= back
        metric_rows.archive_after(connection, 1, reached)
        metric_rows.add(connection, report(reached - 20, loss=-1.0))  # late
        assert len(read) < 2 * (64 + 2 * 32)
        assert metric_rows.summary(connection, 1) == fresh(connection)
        assert drawn(connection) == reported(connection)
        read.clear()


def test_a_name_takes_no_place_in_reports_without_it(connection: sqlite3.Connection) -> None:
    for count in range(320):
        metric_rows.add(connection, report(count, loss=1.0, **{f"class {count}": 2.0}))
    metric_rows.keep_summary(connection, 1)
    assert sizes(connection)[1] == 640
    metric_rows.archive_after(connection, 1, 299)  # all is made again, in one piece
    assert sizes(connection) == (301, 600)
    assert drawn(connection) == reported(connection)


def test_pieces_of_points_are_few(connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_rows, "_READ_AT_ONCE", 600)
    for count in range(2000):
        metric_rows.add(connection, report(count, loss=count / 7))
    rows, points = sizes(connection)
    assert rows <= 4 and points > 1960
    before = drawn(connection)
    assert before == reported(connection)
    metric_rows.summarize_again(connection, 1, -1)
    assert sizes(connection) == (4, 2000) and drawn(connection) == before


def test_a_late_report_makes_only_its_group_again(connection: sqlite3.Connection) -> None:
    for count in range(100):
        metric_rows.add(connection, report(count, loss=count / 7))
        metric_rows.add(connection, report(count, "validation", val=count / 3))
    asked: list[str] = []
    connection.set_trace_callback(asked.append)
    metric_rows.add(connection, report(3, loss=2.0))
    connection.set_trace_callback(None)
    assert asked and not any("'validation'" in sql for sql in asked)
    for group in ("training", "validation"):
        assert drawn(connection, group) == reported(connection, group)
    assert metric_rows.summary(connection, 1) == fresh(connection)


def test_reports_after_a_restart_cost_what_the_first_ones_did(connection: sqlite3.Connection) -> None:
    work: list[int] = []
    written: list[str] = []
    for first in (0, 11):  # the second run starts again after step 10
        for count in range(first, 3000 if first == 0 else 500):
            work.append(0)
            connection.set_progress_handler(lambda: work.append(work.pop() + 1), 100)
            metric_rows.add(connection, report(count, run_id=1 + bool(first), loss=count / 7))
            connection.set_progress_handler(None, 0)
        if first == 0:
            metric_rows.archive_after(connection, 1, 10)
            once = work[:489]
            work.clear()
            connection.set_trace_callback(lambda sql: written.append(sql) if sql.startswith("REPLACE") else None)
    connection.set_trace_callback(None)
    assert len(work) == len(once) and sum(work) < 1.5 * sum(once)  # in hundreds of SQLite's operations
    assert len(written) == 2 * (489 // 32)  # summary and points
    assert metric_rows.known(connection, report(2500, loss=2500 / 7))  # also what is out of sight
    assert drawn(connection) == reported(connection)


def test_a_summary_is_written_once_for_many_reports(connection: sqlite3.Connection) -> None:
    written: list[str] = []
    connection.set_trace_callback(lambda sql: written.append(sql) if sql.startswith("REPLACE INTO summaries") else None)
    for count in range(1, 201):
        # two reports of a step, some that are late
        metric_rows.add(connection, report(count // 2 - 3 * (count % 50 == 49), loss=count / 7))
        assert metric_rows.summary(connection, 1) == fresh(connection)
    assert len(written) <= 200 // 16
    metric_rows.keep_summary(connection, 1)
    kept = connection.execute("SELECT summary FROM summaries WHERE trial_id = 1").fetchone()[0]
    assert json.loads(kept) == fresh(connection)["training"]


def test_the_summary_is_that_of_the_reports_whatever_their_order(connection: sqlite3.Connection) -> None:
    for steps, value in ((1, 0.1), (5, 0.2), (3, 0.3), (3, "x"), (7, math.inf), (6, 0.5), (9, 0.7)):
        metric_rows.add(connection, report(steps, loss=value))
        metric_rows.add(connection, report(steps, "validation", val=steps / 10, **({"late": 1} if steps > 5 else {})))
        assert metric_rows.summary(connection, 1) == fresh(connection)
    metric_rows.add(connection, report(None, "gpu", load=1))
    for hide in (
        lambda: metric_rows.archive_after(connection, 1, 8),
        lambda: metric_rows.archive_repeated(connection, report(6, "validation", run_id=2)),
        lambda: metric_rows.archive_after(connection, 1, 2),
        lambda: metric_rows.archive_after(connection, 1, 0),
    ):
        before = metric_rows.summary(connection, 1)
        hide()
        assert metric_rows.summary(connection, 1) == fresh(connection) != before
    assert metric_rows.summary(connection, 1) == {}


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
