"""Curves of trials out of a master's store: at first all reports, then only what is new."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from zero_trial.master.records import MetricReport, Trial
from zero_trial.master.store import metric_rows
from zero_trial.master.store.database import loads
from zero_trial.report.curves import FORGET_SECONDS, Curve
from zero_trial.trial.runs.events import is_finite


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
        reports = _parsed(rows)
        for name in dict.fromkeys(name for each in reports for name in each) if only is None else (only,):
            _add(held, name, rows, [value if is_finite(value := each.get(name)) else None for each in reports])
        return held.curves

    def ahead(
        self, connection: sqlite3.Connection, trials: Sequence[Trial], group: str, name: str, *, goal: bool
    ) -> None:
        """Read what is new of one metric of many trials at once, so that ``goal`` or ``group``
        finds it read: one query, where each of the trials would need its own.

        Args:
            goal: whether it is the searcher's metric.
        """
        behind: dict[int, dict[int, _Read]] = defaultdict(dict)
        for trial in trials:
            held = self._held(trial, group, "goal" if goal else f"only {name}")
            if held.last and self._newest_of.get(trial.id, 0) > held.last:
                behind[held.last][trial.id] = held
        for last, of in behind.items():
            found: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
            rows = connection.execute(_NEW, (last, self._end, min(of), max(of), group))
            for number, step, text, searched in rows:
                value = searched if goal else loads(text).get(name)
                if number in of and is_finite(value):
                    found[number][0].append(step)
                    found[number][1].append(value)
            for number, (steps, values) in found.items():
                of[number].add(name, steps, values)
            for held in of.values():
                held.last = self._end

    def measured(
        self, connection: sqlite3.Connection, trial: Trial, unit: str, metric: str
    ) -> Sequence[tuple[int, float, float]]:
        """Return the validations as the search saw them: number of the report, how long the trial
        had trained in ``unit``, and the metric, or NaN."""
        held = self._held(trial, "validation", f"measured {unit}")
        rows = self._rows(connection, trial, "validation", held, "metrics")
        for (number, _, _), values in zip(rows, _parsed(rows), strict=True):
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
            f"SELECT id, steps, {column} FROM metrics WHERE trial_id = ? AND grp = ? AND steps IS NOT NULL "
            "AND archived = 0 AND id > ? ORDER BY steps, id",
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


def _parsed(rows: Sequence[tuple[int, int, str]]) -> list[Mapping[str, Any]]:
    """Return the metrics of reports: one text of all of them is read in half of the time."""
    found: list[Mapping[str, Any]] = loads(f"[{','.join(row[2] for row in rows)}]")
    return found


def _add(held: _Read, name: str, rows: Sequence[tuple[int, int, Any]], values: Sequence[float | None]) -> None:
    """Add the values that there are, one of each row."""
    known = [(row[1], value) for row, value in zip(rows, values, strict=True) if value is not None]
    if known:
        held.add(name, [step for step, _ in known], [value for _, value in known])


_NEW = (
    "SELECT trial_id, steps, metrics, searcher_metric FROM metrics NOT INDEXED WHERE id > ? AND id <= ? "
    "AND trial_id BETWEEN ? AND ? AND grp = ? AND archived = 0 AND steps IS NOT NULL"
)


_END = "SELECT run_id, steps, reported FROM metrics WHERE trial_id = ? AND grp = 'training' AND archived = 0 AND steps IS NOT NULL"


def pace(connection: sqlite3.Connection, trial: Trial) -> float | None:
    """Return the steps per second of a trial between its training reports; None with fewer than
    two."""
    first = connection.execute(f"{_END} ORDER BY steps, id LIMIT 1", (trial.id,)).fetchone()
    last = connection.execute(f"{_END} ORDER BY steps DESC, id DESC LIMIT 1", (trial.id,)).fetchone()
    if first is None or first["run_id"] != last["run_id"]:  # the time between two runs does not count
        if first is None:
            return None
        return steps_per_second(metric_rows.of_trial(lambda: nullcontext(connection), trial.id, "training"))
    steps, seconds = last["steps"] - first["steps"], last["reported"] - first["reported"]
    return steps / seconds if steps > 0 and seconds > 0 else None


def steps_per_second(reports: Iterable[MetricReport]) -> float | None:
    """Return steps over time between training reports of one run and the next, validations and
    saves between them included; None with fewer than two."""
    steps, seconds = 0, 0.0
    training = (report for report in reports if report.group == "training" and report.steps_completed is not None)
    for before, after in itertools.pairwise(training):
        if before.run_id == after.run_id and after.reported > before.reported:
            steps += (after.steps_completed or 0) - (before.steps_completed or 0)
            seconds += after.reported - before.reported
    return steps / seconds if steps > 0 and seconds > 0 else None
