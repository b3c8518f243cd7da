"""Metrics in the store: reports, and their summary in the format of a Determined master (type,
count, min, max, sum, mean, last value).

A summary covers the reports of its group in order of arrival. The stored summary may lag behind by
a few reports; readers add the missing ones. Thus a report costs little more than its own row, and
listing a thousand trials reads a thousand summaries.

NaN values stay visible: once a NaN is reported, min, max, sum and mean are NaN. A metric with
values of two types becomes a "string" without statistics. If the newest report lacks a metric, the
metric's last value is null.
"""

from __future__ import annotations

import heapq
import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any, TypeAlias

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

_KEPT_EVERY = 32  # store the summary of a group after this many new reports
_READ_AT_ONCE = 4096  # maximum reports to add to a summary per transaction, so that other writers need not wait
_SENT_AT_ONCE, _SENT_BYTES = 100, 1 << 20  # maximum reports and bytes of text per page


def extend(summary: dict[str, dict[str, Any]], *reports: Mapping[str, Any]) -> None:
    """Add reports, oldest first, to the summary of their group."""
    for metrics in reports:
        _extend(summary, metrics)
    for name, entry in summary.items() if reports else ():
        entry["last"] = reports[-1].get(name)


def _extend(summary: dict[str, dict[str, Any]], metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        kind = "number" if type(value) is float else kind_of(value)
        entry = summary.get(name)
        if entry is None:
            entry = summary[name] = {"type": kind}
        elif entry["type"] != kind:
            entry = summary[name] = {"type": "string"}
        if entry["type"] == "number":
            number = as_number(value)
            if number is not None:
                _count(entry, number)


def kind_of(value: Any) -> str:
    """Return Determined's name for the type of a metric's value."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "number" if as_number(value) is not None else "date" if _TIME.fullmatch(value) else "string"
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "string")


def _count(entry: dict[str, Any], number: float) -> None:
    if "count" not in entry:
        entry.update(count=1, min=number, max=number, sum=0.0 + number)
    else:
        entry["count"] += 1
        entry["sum"] += number
        if math.isfinite(number):  # comparisons preserve existing NaN and infinities
            if number < entry["min"]:
                entry["min"] = number
            if number > entry["max"]:
                entry["max"] = number
        else:
            entry["min"], entry["max"] = _extreme(min, entry["min"], number), _extreme(max, entry["max"], number)
    entry["mean"] = entry["sum"] / entry["count"]


def _extreme(choose: Any, one: float, other: float) -> float:
    """Return the smaller or larger value with the rules of Go's math for infinities and NaN."""
    end = choose(-math.inf, math.inf)
    if end in (one, other):
        return float(end)
    return math.nan if math.isnan(one) or math.isnan(other) else float(choose(one, other))


_COLUMNS = "m.id, m.trial_id, m.run_id, m.grp AS 'group', m.steps AS steps_completed, m.metrics, m.reported, m.archived"
_ADD = """
    INSERT INTO metrics (trial_id, run_id, grp, steps, metrics, batch_metrics, reported, searcher_metric)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""


def add(connection: sqlite3.Connection, report: MetricReport, searcher_metric: float | None = None) -> None:
    """Insert a report. ``searcher_metric``: for a validation, the value that the search uses."""
    batch = None if report.batch_metrics is None else dumps(report.batch_metrics)
    place = report.trial_id, report.run_id, report.group, report.steps_completed
    connection.execute(_ADD, (*place, dumps(report.metrics), batch, report.reported, searcher_metric))
    if report.steps_completed is not None:
        behind = connection.execute(_BEHIND, (report.trial_id, report.group)).fetchone()
        if behind is None or behind[0] == _KEPT_EVERY:
            _keep(connection, report.trial_id, report.group)


_BEHIND = f"""
    SELECT (
        SELECT count(*) FROM (
            SELECT 1 FROM metrics m INDEXED BY metrics_reported
            WHERE m.trial_id = s.trial_id AND m.grp = s.grp AND m.id > s.newest LIMIT {_KEPT_EVERY}
        )
    ) FROM summaries s WHERE s.trial_id = ? AND s.grp = ?
"""
_SINCE = """
    SELECT id, metrics FROM metrics INDEXED BY metrics_reported
    WHERE trial_id = ? AND grp = ? AND id > ? AND archived = 0 AND steps IS NOT NULL ORDER BY id LIMIT ?
"""


def _keep(connection: sqlite3.Connection, trial_id: int, group: str) -> None:
    """Add the next new reports to a group's stored summary. Call it again until complete."""
    found = connection.execute(
        "SELECT newest, summary FROM summaries WHERE trial_id = ? AND grp = ?", (trial_id, group)
    )
    newest, text = found.fetchone() or (0, "{}")
    reports = connection.execute(_SINCE, (trial_id, group, newest, _READ_AT_ONCE)).fetchall()
    if reports:
        summary = loads(text)
        extend(summary, *(loads(each["metrics"]) for each in reports))
        kept = (trial_id, group, reports[-1]["id"], dumps(summary))
        connection.execute("REPLACE INTO summaries VALUES (?, ?, ?, ?)", kept)


def keep_summary(connection: sqlite3.Connection, trial_id: int) -> None:
    """Update the stored summary of each group of a trial with the newest reports."""
    for row in connection.execute("SELECT grp FROM summaries WHERE trial_id = ?", (trial_id,)).fetchall():
        _keep(connection, trial_id, row["grp"])


def _summarize_again(connection: sqlite3.Connection, trial_id: int) -> None:
    """Recompute the summary of a trial from scratch, because some of its reports were archived."""
    connection.execute("UPDATE summaries SET newest = 0, summary = '{}' WHERE trial_id = ?", (trial_id,))
    keep_summary(connection, trial_id)


def number_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as a comparable number; None if it is not a number, or NaN."""
    number = as_number(metrics.get(name))
    return None if number is None or math.isnan(number) else number


def known(connection: sqlite3.Connection, report: MetricReport) -> bool:
    """Return whether a report is stored already: clients repeat it if they missed the response."""
    row = connection.execute(  # match archived or not: the index needs both values, because steps follow in it
        "SELECT 1 FROM metrics WHERE trial_id = ? AND run_id = ? AND grp = ? "
        "AND archived IN (0, 1) AND steps IS ? AND metrics = ? LIMIT 1",
        (report.trial_id, report.run_id, report.group, report.steps_completed, dumps(report.metrics)),
    ).fetchone()
    return row is not None


def archive_after(connection: sqlite3.Connection, trial_id: int, steps: int) -> None:
    """Archive the reports after the step from which the trial restarts."""
    hidden = connection.execute(
        "UPDATE metrics SET archived = 1 WHERE trial_id = ?1 AND steps > ?2 AND archived = 0 "
        "AND grp IN (SELECT grp FROM summaries WHERE trial_id = ?1)",  # for the index
        (trial_id, steps),
    )
    if hidden.rowcount:
        _summarize_again(connection, trial_id)


def archive_repeated(connection: sqlite3.Connection, report: MetricReport) -> None:
    """Archive earlier runs' reports at this step in this group, and at later steps."""
    hidden = connection.execute(
        "UPDATE metrics SET archived = 1 WHERE trial_id = ? AND run_id < ? AND archived = 0 "
        "AND (steps > ? OR (steps = ? AND grp = ?))",
        (report.trial_id, report.run_id, report.steps_completed, report.steps_completed, report.group),
    )
    if hidden.rowcount:
        _summarize_again(connection, report.trial_id)


Opener: TypeAlias = "Callable[[], AbstractContextManager[sqlite3.Connection]]"
"""Opens a view of the store (`Database.reading`)."""


def of_trial(
    opened: Opener, trial_id: int, group: str | None = None, *, batch_metrics: bool = False
) -> Iterator[MetricReport]:
    """Yield the reports that are not archived, ordered by steps, then by arrival.

    Each page is read in its own view of the store, so that a slow client holds neither memory nor
    the -wal file. A page has at most 100 reports and, except for its last report, 1 MiB.
    """
    groups = [group]
    if group is None:
        with opened() as connection:
            found = connection.execute("SELECT DISTINCT grp FROM metrics WHERE trial_id = ?", (trial_id,))
            groups = [row[0] for row in found]
    return heapq.merge(*(_of_group(opened, trial_id, each, batch_metrics) for each in groups), key=_place)


def _place(report: MetricReport) -> tuple[bool, int, int]:
    steps = report.steps_completed
    return steps is not None, steps or 0, report.id


def _of_group(opened: Opener, trial_id: int, group: str | None, batch_metrics: bool) -> Iterator[MetricReport]:
    columns = f"{_COLUMNS}, m.batch_metrics" if batch_metrics else _COLUMNS
    after: tuple[int, ...]
    for condition, after in (("steps IS NULL AND id > ?", (0,)), ("(steps, id) > (?, ?)", (-(1 << 62), 0))):
        query = (
            f"SELECT {columns} FROM metrics m WHERE trial_id = ? AND grp = ? AND archived = 0 AND {condition} "
            f"ORDER BY steps, id LIMIT {_SENT_AT_ONCE}"
        )
        while True:
            page, size = [], 0
            with opened() as connection, closing(connection.execute(query, (trial_id, group, *after))) as rows:
                for row in rows:
                    page.append(_record(row, batch_metrics))
                    size += len(row["metrics"]) + len(row["batch_metrics"] or "" if batch_metrics else "")
                    if size > _SENT_BYTES:
                        break
            if not page:
                break
            yield from page
            after = (page[-1].steps_completed or 0, page[-1].id)[-len(after) :]


def count(connection: sqlite3.Connection, trial_id: int, group: str) -> int:
    """Return the number of reports of a group that are not archived."""
    found = "SELECT count(*) FROM metrics WHERE trial_id = ? AND grp = ? AND archived = 0"
    return int(connection.execute(found, (trial_id, group)).fetchone()[0])


def latest_validations(connection: sqlite3.Connection, which: str, value: int) -> dict[int, MetricReport]:
    """Return the validation with the most steps of each trial.

    Args:
        which: SQL condition for the trials, after the id column, with one parameter: ``value``.
    """
    rows = _first_of_each(connection, which, value, "grp = 'validation'", "steps DESC, id DESC")
    return {row["trial_id"]: _record(row, False) for row in rows}


def best_validations(
    connection: sqlite3.Connection, which: str, value: int, *, smaller_is_better: bool
) -> dict[int, tuple[MetricReport, float]]:
    """Return each trial's best validation by the searcher's metric, with the metric's value.
    Arguments as for `latest_validations`."""
    order = "ASC" if smaller_is_better else "DESC"
    rows = _first_of_each(connection, which, value, "searcher_metric IS NOT NULL", f"searcher_metric {order}, id")
    return {row["trial_id"]: (_record(row, False), row["searcher_metric"]) for row in rows}


def _first_of_each(
    connection: sqlite3.Connection, which: str, value: int, condition: str, order: str
) -> list[sqlite3.Row]:
    """Return the first report of each trial in ``order``, which must match an index."""
    first = f"SELECT id FROM metrics WHERE trial_id = t.id AND archived = 0 AND {condition} ORDER BY {order} LIMIT 1"
    query = f"SELECT {_COLUMNS}, m.searcher_metric FROM trials t JOIN metrics m ON m.id = ({first}) WHERE t.id {which}"
    return connection.execute(query, (value,)).fetchall()


def validations_at_checkpoints(
    connection: sqlite3.Connection, which: str, value: object
) -> dict[tuple[int, int], tuple[Any, float | None]]:
    """Return the validations at the steps of checkpoints: (trial, steps) -> (metrics, searcher's
    metric).

    Args:
        which: SQL condition on the checkpoints ``c``, with one parameter: ``value``.
    """
    rows = connection.execute(
        "SELECT m.trial_id, m.steps, m.metrics, m.searcher_metric FROM checkpoints c JOIN metrics m "
        "ON m.trial_id = c.trial_id AND m.grp = 'validation' AND m.steps = c.steps AND m.archived = 0 "
        f"WHERE {which} ORDER BY m.id",
        (value,),
    )
    return {(row[0], row[1]): (loads(row[2]), row[3]) for row in rows}


def summary(connection: sqlite3.Connection, trial_id: int) -> dict[str, Any]:
    """Return the summary of each metric of each group; see `extend`."""
    found: dict[str, Any] = {}
    rows = connection.execute("SELECT grp, newest, summary FROM summaries WHERE trial_id = ?", (trial_id,))
    for row in rows.fetchall():
        since = connection.execute(_SINCE, (trial_id, row["grp"], row["newest"], -1))
        found[row["grp"]] = loads(row["summary"])
        extend(found[row["grp"]], *(loads(each["metrics"]) for each in since))
    return {group: entries for group, entries in found.items() if entries}


def names(connection: sqlite3.Connection, experiment_id: int) -> list[tuple[str, str]]:
    """List (group, name) of every metric that is a number in any trial of an experiment."""
    rows = connection.execute(
        "SELECT s.grp, s.summary FROM summaries s JOIN trials t ON t.id = s.trial_id WHERE t.experiment_id = ? ORDER BY t.id",
        (experiment_id,),
    )
    found = {
        (row["grp"], str(name)): None
        for row in rows.fetchall()
        for name, entry in loads(row["summary"]).items()
        if entry.get("type") == "number"
    }
    return list(found)


def _record(row: sqlite3.Row, batch_metrics: bool) -> MetricReport:
    return record(MetricReport, row, batch_metrics=loads(row["batch_metrics"]) if batch_metrics else None)
