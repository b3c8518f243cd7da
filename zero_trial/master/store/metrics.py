"""Metrics in the store: reports, and their summary as a Determined master makes it (type, count,
min, max, sum, mean, last value).

The summary is kept beside the reports and grows with each of them, so that a table of a thousand
trials reads a thousand summaries and no report.

A value that is not a number (NaN) stays visible: min, max, sum and mean are NaN from then on.
Values of two types make a metric a "string", without numbers; and the last value of a metric that
the newest report does not have is null.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from zero_trial.master.records import MetricReport, as_number
from zero_trial.master.store.database import dumps, loads, record

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (dict, "object"),
    (list, "array"),
)


def extend(summary: dict[str, dict[str, Any]], metrics: Mapping[str, Any]) -> None:
    """Add one report to the summary of its group."""
    for name, value in metrics.items():
        kind = kind_of(value)
        entry = summary.get(name)
        if entry is None:
            entry = summary[name] = {"type": kind}
        elif entry["type"] != kind:
            entry = summary[name] = {"type": "string"}
        number = as_number(value)
        if entry["type"] == "number" and number is not None:
            _count(entry, number)
    for name, entry in summary.items():
        entry["last"] = metrics.get(name)


def kind_of(value: Any) -> str:
    """Return Determined's name for the type of a metric's value."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "number" if as_number(value) is not None else "date" if _TIME.fullmatch(value) else "string"
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "string")


def _count(entry: dict[str, Any], number: float) -> None:
    entry["count"] = entry.get("count", 0) + 1
    entry["min"] = _extreme(min, entry.get("min", number), number)
    entry["max"] = _extreme(max, entry.get("max", number), number)
    entry["sum"] = entry.get("sum", 0.0) + number
    entry["mean"] = entry["sum"] / entry["count"]


def _extreme(choose: Any, one: float, other: float) -> float:
    """Return the smaller or larger value as Go's math does, with infinities and NaN."""
    end = choose(-math.inf, math.inf)
    if end in (one, other):
        return float(end)
    return math.nan if math.isnan(one) or math.isnan(other) else float(choose(one, other))


_COLUMNS = "id, trial_id, run_id, grp, steps, metrics, reported, archived"
_ADD = """
    INSERT INTO metrics (trial_id, run_id, grp, steps, metrics, batch_metrics, reported, searcher_metric)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""


def add(connection: sqlite3.Connection, report: MetricReport, searcher_metric: float | None = None) -> None:
    """Insert a report. ``searcher_metric`` is the number that the search uses, of a validation."""
    batch = None if report.batch_metrics is None else dumps(report.batch_metrics)
    connection.execute(
        _ADD,
        (
            report.trial_id,
            report.run_id,
            report.group,
            report.steps_completed,
            dumps(report.metrics),
            batch,
            report.reported,
            searcher_metric,
        ),
    )
    if report.steps_completed is not None:
        _summarize(connection, report.trial_id, report.group, report.steps_completed, report.metrics)


def _summarize(
    connection: sqlite3.Connection, trial_id: int, group: str, steps: int, metrics: Mapping[str, Any]
) -> None:
    """Add a report that has just been inserted to the summary of its group."""
    row = connection.execute(
        "SELECT steps, summary FROM summaries WHERE trial_id = ? AND grp = ?", (trial_id, group)
    ).fetchone()
    if row is not None and steps < row["steps"]:  # the order decides the last value and sums of floats
        _summarize_again(connection, trial_id)
        return
    found = {} if row is None else loads(row["summary"])
    extend(found, metrics)
    connection.execute("REPLACE INTO summaries VALUES (?, ?, ?, ?)", (trial_id, group, steps, dumps(found)))


def _summarize_again(connection: sqlite3.Connection, trial_id: int) -> None:
    """Make the summary of a trial from its reports."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    newest: dict[str, int] = {}
    for row in connection.execute(
        "SELECT grp, steps, metrics FROM metrics WHERE trial_id = ? AND archived = 0 AND steps IS NOT NULL "
        "ORDER BY steps, id",
        (trial_id,),
    ):
        extend(groups.setdefault(row["grp"], {}), loads(row["metrics"]))
        newest[row["grp"]] = row["steps"]
    connection.execute("DELETE FROM summaries WHERE trial_id = ?", (trial_id,))
    connection.executemany(
        "INSERT INTO summaries VALUES (?, ?, ?, ?)",
        [(trial_id, group, newest[group], dumps(found)) for group, found in groups.items()],
    )


def fill_summaries(connection: sqlite3.Connection) -> None:
    """Make the summaries that are missing: those of reports that an older release has stored."""
    rows = connection.execute(
        "SELECT id FROM trials WHERE NOT EXISTS (SELECT 1 FROM summaries WHERE trial_id = trials.id) AND EXISTS "
        "(SELECT 1 FROM metrics WHERE trial_id = trials.id AND steps IS NOT NULL AND archived = 0)"
    )
    for row in rows.fetchall():
        _summarize_again(connection, row["id"])


def number_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as a number that can be compared; None if it is not one, or NaN."""
    number = as_number(metrics.get(name))
    return None if number is None or math.isnan(number) else number


def known(connection: sqlite3.Connection, report: MetricReport) -> bool:
    """Return whether this report is there: a client that missed the answer repeats it."""
    row = connection.execute(
        "SELECT 1 FROM metrics WHERE trial_id = ? AND run_id = ? AND grp = ? AND steps IS ? AND metrics = ? LIMIT 1",
        (report.trial_id, report.run_id, report.group, report.steps_completed, dumps(report.metrics)),
    ).fetchone()
    return row is not None


def archive_after(connection: sqlite3.Connection, trial_id: int, steps: int) -> None:
    """Hide the reports after the step from which the trial starts again."""
    hidden = connection.execute(
        "UPDATE metrics SET archived = 1 WHERE trial_id = ? AND steps > ? AND archived = 0", (trial_id, steps)
    )
    if hidden.rowcount:
        _summarize_again(connection, trial_id)


def archive_repeated(connection: sqlite3.Connection, report: MetricReport) -> None:
    """Hide what earlier runs of the trial have reported at the step of this report, in its group,
    and after it, in all groups.
    """
    hidden = connection.execute(
        "UPDATE metrics SET archived = 1 WHERE trial_id = ? AND run_id < ? AND archived = 0 "
        "AND (steps > ? OR (steps = ? AND grp = ?))",
        (report.trial_id, report.run_id, report.steps_completed, report.steps_completed, report.group),
    )
    if hidden.rowcount:
        _summarize_again(connection, report.trial_id)


def of_trial(
    connection: sqlite3.Connection, trial_id: int, group: str | None = None, *, batch_metrics: bool = False
) -> list[MetricReport]:
    """List the reports that are not archived, by steps, then as they came."""
    columns = f"{_COLUMNS}, batch_metrics" if batch_metrics else _COLUMNS
    where = "trial_id = ? AND archived = 0" + ("" if group is None else " AND grp = ?")
    values = [trial_id] if group is None else [trial_id, group]
    rows = connection.execute(f"SELECT {columns} FROM metrics WHERE {where} ORDER BY steps, id", values)
    return [_record(row, batch_metrics) for row in rows.fetchall()]


def latest_validations(connection: sqlite3.Connection, which: str, value: int) -> dict[int, MetricReport]:
    """Return of each trial the validation with the most steps.

    Args:
        which: the trials in SQL, after ``trial_id``, with one parameter: ``value``.
    """
    rows = _first_of_each(connection, which, value, "", "steps DESC, id DESC")
    return {row["trial_id"]: _record(row, False) for row in rows}


def best_validations(
    connection: sqlite3.Connection, which: str, value: int, *, smaller_is_better: bool
) -> dict[int, tuple[MetricReport, float]]:
    """Return of each trial the best validation by the searcher's metric, with that number; the
    arguments are those of `latest_validations`.
    """
    order = "ASC" if smaller_is_better else "DESC"
    rows = _first_of_each(connection, which, value, "AND searcher_metric IS NOT NULL", f"searcher_metric {order}, id")
    return {row["trial_id"]: (_record(row, False), row["searcher_metric"]) for row in rows}


def _first_of_each(
    connection: sqlite3.Connection, which: str, value: int, condition: str, order: str
) -> list[sqlite3.Row]:
    validations = f"FROM metrics WHERE trial_id {which} AND grp = 'validation' AND archived = 0 {condition}"
    if which == "= ?":
        query = f"SELECT {_COLUMNS}, searcher_metric {validations} ORDER BY {order} LIMIT 1"
    else:
        place = f"row_number() OVER (PARTITION BY trial_id ORDER BY {order}) AS place"
        chosen = f"SELECT id FROM (SELECT id, {place} {validations}) WHERE place = 1"
        query = f"SELECT {_COLUMNS}, searcher_metric FROM metrics WHERE id IN ({chosen})"
    return connection.execute(query, (value,)).fetchall()


def validation_at(
    connection: sqlite3.Connection, trial_id: int, steps: int
) -> tuple[MetricReport, float | None] | None:
    """Return the validation of a trial at a step, with the searcher's metric of it."""
    row = connection.execute(
        f"SELECT {_COLUMNS}, searcher_metric FROM metrics WHERE trial_id = ? AND grp = 'validation' AND steps = ? AND archived = 0 "
        "ORDER BY id DESC LIMIT 1",
        (trial_id, steps),
    ).fetchone()
    return None if row is None else (_record(row, False), row["searcher_metric"])


def summary(connection: sqlite3.Connection, trial_id: int) -> dict[str, Any]:
    """Return the summary of each metric of each group, see `extend`."""
    rows = connection.execute("SELECT grp, summary FROM summaries WHERE trial_id = ?", (trial_id,))
    return {row["grp"]: loads(row["summary"]) for row in rows}


def _record(row: sqlite3.Row, batch_metrics: bool) -> MetricReport:
    return record(
        MetricReport,
        row,
        group=row["grp"],
        steps_completed=row["steps"],
        metrics=loads(row["metrics"]),
        batch_metrics=loads(row["batch_metrics"]) if batch_metrics else None,
        archived=bool(row["archived"]),
    )
