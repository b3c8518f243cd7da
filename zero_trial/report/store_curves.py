"""Curves of trials out of a master's store, each read once and then only what is new."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_trial.master.records import MetricReport, Trial
from zero_trial.master.store import metrics
from zero_trial.report.curves import FORGET_SECONDS, Curve
from zero_trial.runs.records import is_finite

_CHUNK = 20_000  # reports that are read at once
_SPREAD = 4  # of so many reports in a row one at least must be wanted, or each trial is read by itself


@dataclass
class _Read:
    """What was read of one trial.

    Args:
        run_id: in which of its runs.
        last: the report up to which it was read.
        highest: the most steps of a report that was read.
        used: when it was last asked for, by ``time.monotonic``.
        measured: validations as the search saw them, see `StoreCurves.measured`.
    """

    run_id: int
    last: int = 0
    highest: float = float("-inf")
    used: float = 0.0
    curves: dict[str, Curve] = field(default_factory=dict)
    measured: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, name: str, steps: Sequence[float], values: Sequence[float]) -> None:
        """Add finite values of a metric, at least one."""
        self.curves.setdefault(name, Curve()).extend(steps, values)
        self.highest = max(self.highest, max(steps))


class StoreCurves:
    """Keeps the curves of the trials that are looked at. ``refresh`` comes before each look.

    A trial that starts again is read again, because its reports after that step do not count any
    more. So is everything when the newest report was deleted, because its number is given again.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[int, str, str], _Read] = {}  # trial, group, what of it
        self._newest: tuple[Any, ...] | None = None  # the store's newest report: its number and what is known of it
        self._newest_of: dict[int, int] = {}  # report of each trial that has got one since the first look

    @property
    def _end(self) -> int:
        return self._newest[0] if self._newest is not None else 0

    def refresh(self, connection: sqlite3.Connection) -> None:
        """Learn which trials have new reports, and let go of what has not been asked for lately."""
        since = time.monotonic() - FORGET_SECONDS
        self._read = {key: held for key, held in self._read.items() if held.used >= since}
        if self._newest is not None and _report(connection, "WHERE id = ?", self._end) != self._newest:
            self._read, self._newest_of = {}, {}
        if self._read:
            new = connection.execute(
                "SELECT trial_id, grp, max(id), min(steps), max(run_id) FROM metrics NOT INDEXED WHERE id > ? "
                "GROUP BY trial_id, grp",
                (self._end,),
            )
            for trial, group, newest, steps, run_id in new:
                self._newest_of[trial] = max(newest, self._newest_of.get(trial, 0))
                if run_id > 1 and steps is not None:
                    self._forget_repeated(trial, group, steps)
        self._newest = _report(connection, "ORDER BY id DESC LIMIT 1")

    def _forget_repeated(self, trial: int, group: str, steps: int) -> None:
        """Forget what a later run of a trial may have archived: earlier runs' reports after
        ``steps`` in all groups, and at it in its own."""
        for key, held in list(self._read.items()):
            if key[0] == trial and (held.highest > steps or (key[1] == group and held.highest == steps)):
                del self._read[key]

    def goal(self, connection: sqlite3.Connection, trial: Trial, metric: str) -> Curve:
        """Return the searcher's metric, which has a column of its own in the store."""
        held = self._held(trial, "validation", "goal")
        rows = self._rows(connection, trial, "validation", held, "searcher_metric")
        _add(held, metric, rows, [row[2] for row in rows])
        return held.curves.get(metric) or Curve()

    def group(
        self, connection: sqlite3.Connection, trial: Trial, group: str, only: str | None = None
    ) -> Mapping[str, Curve]:
        """Return the metrics of a group by name, or ``only`` one of them."""
        held = self._held(trial, group, "all" if only is None else f"only {only}")
        rows = self._rows(connection, trial, group, held, "metrics")
        joined = ",".join(row[2] for row in rows)
        found = {only: _numbers(joined, len(rows), only)} if only is not None else _all_numbers(joined)
        for name, values in found.items():
            _add(held, name, rows, values)
        return held.curves

    def ahead(
        self, connection: sqlite3.Connection, trials: Sequence[Trial], group: str, name: str, *, goal: bool
    ) -> None:
        """Read one metric of many trials at once, so that ``goal`` or ``group`` finds it read.

        Reports of trials that train at the same time alternate in the store: to read them in the
        order in which they came takes a fraction of the time of reading each trial's by itself.

        Args:
            goal: whether it is the searcher's metric.
        """
        behind: dict[int, dict[int, _Read]] = defaultdict(dict)
        for trial in trials:
            held = self._held(trial, group, "goal" if goal else f"only {name}")
            if not held.last or self._newest_of.get(trial.id, 0) > held.last:
                behind[held.last][trial.id] = held
            else:
                held.last = self._end
        for last, of in behind.items():
            span = self._span(connection, group, of, last)
            if span is None:
                continue
            for first in range(span[0], span[1] + 1, _CHUNK):
                within = first, min(first + _CHUNK - 1, span[1])
                for number, steps, values in (_goals if goal else _values)(connection, within, of, group, name):
                    of[number].add(name, steps, values)
            for held in of.values():
                held.last = self._end

    def _span(
        self, connection: sqlite3.Connection, group: str, of: Mapping[int, _Read], last: int
    ) -> tuple[int, int] | None:
        """Return the first and the last report among which those of some trials are; None where
        they are few among others."""
        if last:
            return last + 1, self._end
        counted = [
            connection.execute(
                "SELECT count(*), min(id) FROM metrics INDEXED BY metrics_trial WHERE trial_id = ? AND grp = ?",
                (number, group),
            ).fetchone()
            for number in of
        ]
        count, first = sum(row[0] for row in counted), min((row[1] for row in counted if row[0]), default=0)
        return (first, self._end) if self._end - first < _SPREAD * count else None

    def measured(
        self, connection: sqlite3.Connection, trial: Trial, unit: str, metric: str
    ) -> Sequence[tuple[int, float, float]]:
        """Return the validations as the search saw them: number of the report, how long the trial
        had trained in ``unit``, and the metric, or NaN."""
        held = self._held(trial, "validation", f"measured {unit}")
        rows = self._rows(connection, trial, "validation", held, "metrics")
        for (number, _, _), values in zip(rows, _parsed(",".join(row[2] for row in rows)), strict=True):
            if is_finite(values.get(unit)) and metric in values:
                value = values[metric]
                held.measured.append((number, float(values[unit]), float(value) if is_finite(value) else float("nan")))
        return held.measured

    def _held(self, trial: Trial, group: str, what: str) -> _Read:
        key = (trial.id, group, what)
        held = self._read.get(key)
        if held is None or held.run_id != trial.run_id:
            held = self._read[key] = _Read(trial.run_id)
        held.used = time.monotonic()
        return held

    def _rows(
        self, connection: sqlite3.Connection, trial: Trial, group: str, held: _Read, column: str
    ) -> Sequence[tuple[int, int, Any]]:
        """Return number, steps and a column of the reports that are new, by steps."""
        after, held.last = held.last, self._end
        if after and self._newest_of.get(trial.id, 0) <= after:
            return ()
        cursor = connection.cursor()
        cursor.row_factory = None
        rows = cursor.execute(
            f"SELECT id, steps, {column} FROM metrics WHERE trial_id = ? AND grp = ? AND archived = 0 AND steps IS NOT NULL AND id > ? "
            "ORDER BY steps, id",
            (trial.id, group, after),
        ).fetchall()
        if rows:
            held.highest = max(held.highest, rows[-1][1])
        return rows


def _report(connection: sqlite3.Connection, where: str, *values: int) -> tuple[Any, ...] | None:
    """Return number and identity of one report; None if there is none."""
    row = connection.execute(f"SELECT id, trial_id, run_id, grp, steps, reported FROM metrics {where}", values)
    found = row.fetchone()
    return None if found is None else tuple(found)


def _add(held: _Read, name: str, rows: Sequence[tuple[int, int, Any]], values: Sequence[float | None]) -> None:
    """Add the values that there are, one of each row."""
    known = [(row[1], value) for row, value in zip(rows, values, strict=True) if value is not None]
    if known:
        held.add(name, [step for step, _ in known], [value for _, value in known])


_WITHIN = (
    "FROM metrics NOT INDEXED WHERE id BETWEEN ? AND ? AND trial_id BETWEEN ? AND ? "
    "AND grp = ? AND archived = 0 AND steps IS NOT NULL"
)

Piece = tuple[int, Sequence[float], Sequence[float]]  # of a trial's curve: its number, steps and values


def _goals(
    connection: sqlite3.Connection, within: tuple[int, int], of: Mapping[int, _Read], group: str, name: str
) -> Iterator[Piece]:
    """Yield the searcher's metric in the reports of two numbers and between, trial by trial."""
    query = f"SELECT trial_id, steps, searcher_metric {_WITHIN} AND searcher_metric IS NOT NULL"
    found: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for number, step, value in connection.execute(query, (*within, min(of), max(of), group)):
        found[number][0].append(step)
        found[number][1].append(value)
    for number in found.keys() & of.keys():
        yield number, *found[number]


def _values(
    connection: sqlite3.Connection, within: tuple[int, int], of: Mapping[int, _Read], group: str, name: str
) -> Iterator[Piece]:
    """Yield a metric as `_goals` does. Reports are joined by SQLite and cut by numpy, which
    takes half of the time of a row for each."""
    import numpy as np

    columns = "count(*), group_concat(trial_id), group_concat(steps), group_concat(metrics)"
    # a range of the table's own key is read in its order
    query = f"SELECT {columns} {_WITHIN}"
    try:
        count, *joined = connection.execute(query, (*within, min(of), max(of), group)).fetchone()
    except sqlite3.DataError:  # more than SQLite joins
        start, end = within
        if start == end:
            raise
        for half in (start, (start + end) // 2), ((start + end) // 2 + 1, end):
            yield from _values(connection, half, of, group, name)
        return
    if not count:
        return
    numbers, steps = (np.fromstring(text, dtype=np.int64, sep=",") for text in joined[:2])
    values = np.array(_numbers(joined[2], count, name), dtype=np.float64)
    order = np.argsort(numbers, kind="stable")
    order = order[np.isfinite(values[order])]
    if not len(order):
        return
    numbers, steps, values = numbers[order], steps[order].astype(np.float64), values[order]
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    for first, end in zip(firsts, [*firsts[1:], len(numbers)], strict=True):
        number = int(numbers[first])
        if number in of:
            yield number, array("d", steps[first:end].tobytes()), array("d", values[first:end].tobytes())


def _numbers(joined: str, count: int, name: str) -> list[float | None]:
    """Return a metric of each of ``count`` reports, whose texts are joined by commas; None where it
    is not a finite number.

    If each report has the metric once, as a number and not within another value, the numbers are
    found without reading the rest, which takes a quarter of the time.
    """
    key = f"{json.dumps(name)}:"
    # within a text, a quote is preceded by a backslash
    if joined.count("{") == count and f"\\{key}" not in joined:
        found = re.findall(rf"{re.escape(key)}(-?[0-9][0-9.eE+-]{{0,40}})[,}}]", joined)
        if len(found) == count:
            return list(map(float, found))
    return [value if is_finite(value := each.get(name)) else None for each in _parsed(joined)]


def _all_numbers(joined: str) -> dict[str, list[float | None]]:
    """Return every metric of the reports by name, as `_numbers` returns one."""
    values = _parsed(joined)
    return {
        str(name): [value if is_finite(value := each.get(name)) else None for each in values]
        for name in dict.fromkeys(name for each in values for name in each)
    }


def _parsed(joined: str) -> list[Mapping[str, Any]]:
    """Return the metrics of reports: one text of all of them is read in half of the time."""
    found: list[Mapping[str, Any]] = json.loads(f"[{joined}]")
    return found


_END = "SELECT run_id, steps, reported FROM metrics WHERE trial_id = ? AND grp = 'training' AND archived = 0 AND steps IS NOT NULL"


def pace(connection: sqlite3.Connection, trial: Trial) -> float | None:
    """Return the steps per second of a trial between its training reports; None with fewer than
    two."""
    first = connection.execute(f"{_END} ORDER BY steps, id LIMIT 1", (trial.id,)).fetchone()
    last = connection.execute(f"{_END} ORDER BY steps DESC, id DESC LIMIT 1", (trial.id,)).fetchone()
    if first is None or first["run_id"] != last["run_id"]:  # the time between two runs does not count
        return steps_per_second(metrics.of_trial(connection, trial.id, "training")) if first is not None else None
    steps, seconds = last["steps"] - first["steps"], last["reported"] - first["reported"]
    return steps / seconds if steps > 0 and seconds > 0 else None


def steps_per_second(reports: Sequence[MetricReport]) -> float | None:
    """Return steps over time between training reports of one run and the next, validations and
    saves between them included; None with fewer than two."""
    steps, seconds = 0, 0.0
    training = [report for report in reports if report.group == "training" and report.steps_completed is not None]
    for before, after in itertools.pairwise(training):
        if before.run_id == after.run_id and after.reported > before.reported:
            steps += (after.steps_completed or 0) - (before.steps_completed or 0)
            seconds += after.reported - before.reported
    return steps / seconds if steps > 0 and seconds > 0 else None
