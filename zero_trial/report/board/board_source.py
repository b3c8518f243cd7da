"""Where the board's values come from: a master's store, or folders of runs. Nothing is written."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Protocol

from zero_trial.errors import ConfigError
from zero_trial.master import logs
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import Experiment, Trial
from zero_trial.master.store import experiment_rows, metric_rows
from zero_trial.master.store import trial_rows as trials
from zero_trial.master.store.database import reading
from zero_trial.report.curves import FORGET_SECONDS
from zero_trial.report.master_reader import experiment_status, read_experiment, read_trial
from zero_trial.report.report_data import Axis, RunReport, Status, SweepReport, differing_axes, leaves
from zero_trial.report.run_reader import RunReader, is_run, point, why_unreadable
from zero_trial.report.store_curves import StoreCurves
from zero_trial.trial.runs.events import Tail
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.files import signature

_FIRST_LINES = 500  # of a log, when it is opened
_FIRST_BYTES = 128 * 1024
_MOST_COMPARED = 12


@dataclass(frozen=True)
class OverviewRow:
    """One experiment, or one run of a folder.

    Args:
        done: the share of its training that is done; None if that is not known.
        best: the searcher's metric, as it was reported.
        started: seconds since the epoch.
    """

    name: str
    title: str
    status: Status
    done: float | None = None
    metric: str = ""
    best: float | None = None
    steps: str = ""
    trials: str = ""
    started: float | None = None


@dataclass(frozen=True)
class Overview:
    """All there is; ``begin`` are commands for the case that there is nothing."""

    title: str
    subtitle: str
    noun: str  # what a row is: experiment or run
    rows: tuple[OverviewRow, ...]
    begin: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputLine:
    """A line of output, with its rank and time where they are known."""

    text: str
    rank: int | None = None
    time: float | None = None
    level: str = ""


class Log(Protocol):
    """The log of one run."""

    def new(self) -> list[OutputLine]:
        """Return the newest lines; from the second call on those that have come since."""


@dataclass(frozen=True)
class Comparison:
    """Chosen trials or runs by name, and the values in which they differ."""

    reports: Mapping[str, RunReport]
    points: Mapping[str, Mapping[str, Any]]
    axes: tuple[Axis, ...]


class BoardSource(Protocol):
    """What the board shows. A name that is not there raises ConfigError.

    Attributes:
        unit: what one training is called: ``trial`` or ``run``.
    """

    unit: str

    def version(self) -> object:
        """Return a value that changes when anything changes; it costs little."""

    def overview(self) -> Overview: ...

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> tuple[SweepReport, Sequence[tuple[str, str]]]:
        """Return an experiment, and group and name of every metric that its curves can show."""

    def run(self, name: str) -> RunReport: ...

    def experiment_of(self, name: str) -> str | None:
        """Return the experiment of a trial; None for a run by itself."""

    def compare(self, names: Sequence[str]) -> Comparison: ...

    def log(self, name: str) -> Log: ...


def check_count(names: Sequence[str]) -> None:
    """Raise ConfigError for more than can be told apart in one drawing."""
    if not 1 <= len(names) <= _MOST_COMPARED:
        raise ConfigError("too many to compare", where="name", got=len(names), expected=f"1 to {_MOST_COMPARED}")


class StoreSource:
    """A master's store and logs, which a master may be writing."""

    unit = "trial"

    def __init__(self, directory: MasterDirectory) -> None:
        self._directory = directory
        self._curves = StoreCurves()
        self._mutex = threading.Lock()  # one thread at a time: curves are kept between

    def version(self) -> object:
        base = self._directory.database
        return signature(base), signature(base.with_name(f"{base.name}-wal"))

    def overview(self) -> Overview:
        with reading(self._directory.database) as connection:
            rows = tuple(_row(each) for each in experiment_rows.all_(connection) if not each.archived)[::-1]
        return Overview(
            "Experiments",
            f"embedded master in {self._directory.root}",
            "experiment",
            rows,
            ("det experiment create const.yaml MODEL_DIR -f",),
        )

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> tuple[SweepReport, Sequence[tuple[str, str]]]:
        with self._mutex, reading(self._directory.database) as connection:
            number = _number(name)
            report = read_experiment(connection, self._curves, number, drawn)
            return report, metric_rows.names(connection, number)

    def run(self, name: str) -> RunReport:
        with self._mutex, reading(self._directory.database) as connection:
            return read_trial(connection, self._curves, _number(name))

    def experiment_of(self, name: str) -> str | None:
        with reading(self._directory.database) as connection:
            return str(self._trial(connection, name).experiment_id)

    def _trial(self, connection: Connection, name: str) -> Trial:
        found = trials.get(connection, _number(name))
        if found is None:
            raise _missing("trial", name)
        return found

    def compare(self, names: Sequence[str]) -> Comparison:
        check_count(names)
        with self._mutex, reading(self._directory.database) as connection:
            reports = {name: read_trial(connection, self._curves, _number(name)) for name in names}
            points = {name: leaves(self._trial(connection, name).hparams) for name in names}
        return Comparison(reports, points, differing_axes(list(points.values())))

    def log(self, name: str) -> Log:
        with reading(self._directory.database) as connection:
            trial = self._trial(connection, name)
        return _StoreLog(logs.Source(self._directory.trial_logs(trial.id), trial.id, trial.task_id))


class _StoreLog:
    """Lines that the master has stored of a trial."""

    def __init__(self, source: logs.Source) -> None:
        self._tail = logs.LogTail(source)
        self._begun = False

    def new(self) -> list[OutputLine]:
        fresh = self._tail.new() if self._begun else reversed(list(islice(self._tail.newest_first(), _FIRST_LINES)))
        self._begun = True
        return [OutputLine(line.message, line.rank, line.time, line.level) for line in fresh]


class RunsSource:
    """The runs in a folder, or the only one that the folder itself is.

    A name is one of those that the folder lists, so none leads out of it. What was read of a run
    is forgotten when it has not been asked for lately.
    """

    unit = "run"

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                "there is no such folder", where="FOLDER", got=str(folder), expected="a folder of runs, such as runs"
            )
        self._folder = folder
        self._mutex = threading.Lock()
        self._readers: dict[str, RunReader] = {}

    def _runs(self) -> dict[str, RunReader]:
        """Return a reader of each run that is there now, in the order of their names."""
        there = {path.name: path for path in sorted(self._folder.iterdir()) if path.is_dir() and is_run(path)}
        if not there and is_run(self._folder):
            there = {self._folder.resolve().name: self._folder}
        since = time.monotonic() - FORGET_SECONDS
        with self._mutex:
            kept = {name: reader for name, reader in self._readers.items() if reader.asked >= since}
            self._readers = {name: kept.get(name) or RunReader(path) for name, path in there.items()}
            return self._readers

    def _reader(self, name: str) -> RunReader:
        found = self._runs().get(name)
        if found is None:
            raise _missing("run", name)
        return found

    def version(self) -> object:
        return tuple((name, reader.signature()) for name, reader in self._runs().items())

    def overview(self) -> Overview:
        rows = (_row_of_run(name, reader) for name, reader in reversed(self._runs().items()))
        shown = tuple(row for row in rows if row is not None)
        return Overview("Runs", str(self._folder.resolve()), "run", shown, ("zero-trial run const.yaml MODEL_DIR",))

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> tuple[SweepReport, Sequence[tuple[str, str]]]:
        raise _missing("experiment", name)

    def run(self, name: str) -> RunReport:
        return self._reader(name).report()

    def experiment_of(self, name: str) -> str | None:
        return None

    def compare(self, names: Sequence[str]) -> Comparison:
        check_count(names)
        readers = {name: self._reader(name) for name in names}
        points = {name: point(reader.config()) for name, reader in readers.items()}
        return Comparison(
            {name: reader.report() for name, reader in readers.items()}, points, differing_axes(list(points.values()))
        )

    def log(self, name: str) -> Log:
        return _RankLogs(RunFolder(self._reader(name).folder))


class _RankLogs:
    """The output of each rank of a run."""

    def __init__(self, files: RunFolder) -> None:
        self._files = files
        self._tails: dict[int, Tail] = {}
        self._unreadable: set[int] = set()  # ranks whose log is known not to be readable

    def new(self) -> list[OutputLine]:
        begun = bool(self._tails)
        found = []
        for rank in itertools.count():
            path = self._files.log(rank)
            if rank not in self._tails:
                if not os.path.lexists(path):
                    break
                self._tails[rank] = Tail(path, newest=None if begun else _FIRST_BYTES)
            try:
                found += [OutputLine(line, rank) for line in self._tails[rank].lines()]
            except OSError as error:
                if rank not in self._unreadable:
                    found.append(OutputLine(f"{path.name} cannot be read: {why_unreadable(error)}", rank))
                self._unreadable.add(rank)
        return found


def _missing(noun: str, name: str) -> ConfigError:
    return ConfigError(f"there is no such {noun}", where="name", got=name[:80])


def _number(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 9:
        raise ConfigError("an id is a number", where="name", got=name[:80])
    return int(name)


def _row(experiment: Experiment) -> OverviewRow:
    searcher = experiment.config.get("searcher") or {}
    pruned = f", {experiment.pruned_trials} pruned" if experiment.pruned_trials else ""
    return OverviewRow(
        name=str(experiment.id),
        title=experiment.name or f"experiment {experiment.id}",
        status=experiment_status(experiment),
        done=1.0 if experiment.state.value == "COMPLETED" else experiment.progress,
        metric=str(searcher.get("metric", "")),
        best=experiment.best_metric,
        trials=f"{experiment.num_trials}{pruned}",
        started=experiment.created,
    )


def _row_of_run(name: str, reader: RunReader) -> OverviewRow | None:
    """Return the row of a run; None if it was removed after it was listed."""
    try:
        report = reader.report()
    except ConfigError:
        return None
    change = report.changes[0] if report.changes else None
    loss = report.training.values[-1] if report.training is not None and len(report.training) else None
    facts = dict(report.facts)
    done, _, total = facts.get("steps", "").partition(" of ")
    share = int(done) / int(total) if done.isdigit() and total.isdigit() and int(total) > 0 else None
    return OverviewRow(
        name=name,
        title=" · ".join([*([report.title] if report.title != name else []), *report.left_out]),
        status=report.status,
        done=share,
        metric=change.name if change is not None else "loss" if loss is not None else "",
        best=change.after if change is not None else loss,
        steps=facts.get("steps", ""),
        started=reader.began,
    )
