"""Curves of trials out of a master's store, each read once and then only what is new."""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_trial.master.records import MetricReport, Trial
from zero_trial.master.store import metrics
from zero_trial.report.curves import Curve
from zero_trial.runs.records import is_finite

_FORGET_SECONDS = 120.0  # after which curves that nobody has asked for are read again


@dataclass
class _Read:
    """What was read of one trial: up to which report, in which of its runs, and when it was last
    asked for.
    """

    run_id: int
    last: int = 0
    used: float = 0.0
    curves: dict[str, Curve] = field(default_factory=dict)
    measured: list[tuple[int, float, float]] = field(default_factory=list)


class StoreCurves:
    """Keeps the curves of the trials that are looked at. ``refresh`` comes before each look.

    A trial that starts again is read again, because its reports after that step do not count any
    more.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], _Read] = {}
        self._newest = 0  # report of the store
        self._newest_of: dict[int, int] = {}  # report of each trial that has got one since the first look

    def refresh(self, connection: sqlite3.Connection) -> None:
        """Learn which trials have new reports, and let go of what has not been asked for lately."""
        newest = connection.execute("SELECT max(id) FROM metrics").fetchone()[0] or 0
        if self._read:
            rows = connection.execute(
                "SELECT trial_id, max(id) FROM metrics WHERE id > ? GROUP BY trial_id", (self._newest,)
            )
            self._newest_of |= {row[0]: row[1] for row in rows}
        self._newest = newest
        since = time.monotonic() - _FORGET_SECONDS
        self._read = {key: held for key, held in self._read.items() if held.used >= since}

    def goal(self, connection: sqlite3.Connection, trial: Trial, metric: str) -> Curve:
        """Return the searcher's metric, which has a column of its own in the store."""
        held = self._held(trial, "goal")
        found = held.curves.setdefault(metric, Curve())
        rows = self._rows(connection, trial, "validation", held, "steps, searcher_metric")
        found.extend([(step, value) for step, value in rows if value is not None])
        return found

    def group(
        self, connection: sqlite3.Connection, trial: Trial, group: str, only: str | None = None
    ) -> Mapping[str, Curve]:
        """Return the metrics of a group by name, or ``only`` one of them."""
        held = self._held(trial, f"{group}/{only or ''}")
        rows = self._rows(connection, trial, group, held, "steps, metrics")
        values = _parsed([text for _, text in rows])
        for name in dict.fromkeys(str(name) for each in values for name in each) if only is None else (only,):
            pairs = [
                (step, each[name]) for (step, _), each in zip(rows, values, strict=True) if is_finite(each.get(name))
            ]
            if pairs:
                held.curves.setdefault(name, Curve()).extend(pairs)
        return held.curves

    def measured(
        self, connection: sqlite3.Connection, trial: Trial, unit: str, metric: str
    ) -> Sequence[tuple[int, float, float]]:
        """Return the validations as the search saw them: number of the report, how long the trial
        had trained in ``unit``, and the metric, or NaN."""
        held = self._held(trial, f"measured/{unit}")
        rows = self._rows(connection, trial, "validation", held, "id, metrics")
        for (number, _), values in zip(rows, _parsed([text for _, text in rows]), strict=True):
            if is_finite(values.get(unit)) and metric in values:
                value = values[metric]
                held.measured.append((number, float(values[unit]), float(value) if is_finite(value) else float("nan")))
        return held.measured

    def _held(self, trial: Trial, what: str) -> _Read:
        key = (trial.id, what)
        held = self._read.get(key)
        if held is None or held.run_id != trial.run_id:
            held = self._read[key] = _Read(trial.run_id)
        held.used = time.monotonic()
        return held

    def _rows(
        self, connection: sqlite3.Connection, trial: Trial, group: str, held: _Read, columns: str
    ) -> Sequence[tuple[Any, Any]]:
        """Return two columns of the reports that are new, by steps."""
        after, held.last = held.last, self._newest
        if after and self._newest_of.get(trial.id, 0) <= after:
            return ()
        cursor = connection.cursor()
        cursor.row_factory = None  # plain tuples: there may be a million
        return cursor.execute(
            f"SELECT {columns} FROM metrics WHERE trial_id = ? AND grp = ? AND archived = 0 AND steps IS NOT NULL AND id > ? "
            "ORDER BY steps, id",
            (trial.id, group, after),
        ).fetchall()


def _parsed(texts: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the metrics of reports: one text of all of them is read in half of the time."""
    found: list[Mapping[str, Any]] = json.loads(f"[{','.join(texts)}]")
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
