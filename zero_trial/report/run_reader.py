"""Read the folder of one run, finished, running, failed or preempted, or a folder of runs as a
sweep.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.report.curves import Curve, finite
from zero_trial.report.report_data import (
    BestConfig,
    CheckpointRow,
    Memory,
    MetricChange,
    RunReport,
    Series,
    Setting,
    Status,
    SweepReport,
    Tone,
    TrialReport,
    as_yaml,
    differing_axes,
    format_time,
    leaves,
)
from zero_trial.schema.document import ValueSource
from zero_trial.trial.runs.events import (
    COUNTERS,
    PROGRESS,
    Tail,
    baselines,
    is_finite,
    join_memory,
    json_line,
    read_text,
)
from zero_trial.trial.runs.provenance import read_lock
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.files import signature
from zero_trial.util.text import format_count, format_duration, format_number

Record = Mapping[str, Any]
Found = TypeVar("Found")

_MOST_BYTES = 256 << 20  # of events.jsonl and of metrics.jsonl
_MOST_LOCK = 1 << 20  # bytes
_MOST_CURVES = 200  # metrics in training, and in validation
_MOST_RECORDS = 2000  # checkpoints, and starts


def is_run(folder: Path) -> bool:
    """Return whether a run has written into this folder, or may have: the folder cannot be read."""
    files = RunFolder(folder)
    try:
        return any(path.is_file() for path in (files.events, files.metrics, files.config_lock))
    except OSError:
        return True


def why_unreadable(error: Exception) -> str:
    """Return the reason for which a file of a run cannot be read, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = " ".join(str(error).split())
    return said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"


def check_is_run(folder: Path) -> None:
    """Raise ConfigError unless a run has written into this folder."""
    if not is_run(folder):
        expected = "a run's folder, such as runs/0001"
        raise ConfigError("there is no run in this folder", where=str(folder), expected=expected)


def from_run_folder(folder: Path) -> RunReport:
    """Return everything that the folder has. Raises ConfigError if no run has been there."""
    return RunReader(folder).report()


class RunReader:
    """Reads a run's folder, and on the next call only what its files have got since. Many threads
    may call it at once.

    ``folder`` may be empty still; ``report`` raises ConfigError until a run has written into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = files = RunFolder(folder)
        self._mutex = threading.RLock()
        self._events, self._metrics = Tail(files.events, most=_MOST_BYTES), Tail(files.metrics, most=_MOST_BYTES)
        self._record = _Record()
        self._made: tuple[object, RunReport] | None = None
        self._locked: tuple[object, str, dict[str, Any]] | None = None  # signature, text and content of the lock
        self._left_out: dict[str, str] = {}  # file -> why it is not in the report, or a part of it
        self.asked = 0.0  # when the report was asked for last, by time.monotonic

    @property
    def began(self) -> float | None:
        """Return the time of the first event, in seconds since the epoch."""
        return self._record.began

    def signature(self) -> tuple[object, ...]:
        """Return a value that changes when a file changes from which the report is made."""
        files = self._files
        paths = (files.events, files.metrics, files.summary, files.errors, files.checkpoints, files.config_lock)
        return tuple(map(signature, paths))

    def report(self) -> RunReport:
        """Return everything that the folder has; ``left_out`` names what cannot be read. Raises
        ConfigError if no run has been there."""
        with self._mutex:
            self.asked = time.monotonic()
            now = self.signature()  # before reading: what is written meanwhile is read next time
            if self._made is None or self._made[0] != now:
                self._made = now, self._report()
            return self._made[1]

    def _report(self) -> RunReport:
        check_is_run(self.folder)
        lock_file = self._files.config_lock.name
        self._left_out = {name: why for name, why in self._left_out.items() if name == lock_file}  # read if it changes
        files = self._files
        self._try(files.events, self._read, None)
        record = self._record
        summary, body = self._object(files.summary), self._object(files.resolved_config)
        errors = [self._object(path) for path in files.error_files()]
        training, progress = record.training_series()
        lock, config = self._lock()
        goal = mapping(config.get("searcher"))
        changes = sorted(
            _changes(summary, record.validations(), record.best(goal)),
            key=lambda change: change.name != goal.get("metric"),
        )
        status, message = _status(summary, errors, record.last, readable=not self._left_out)
        memory = self._try(files.summary, lambda: _memory(join_memory(summary, [record.memory]), record.plan), Memory())
        settings: dict[str, Any] = self._try(files.resolved_config, lambda: settings_of(body), {})
        return RunReport(
            title=str(config.get("name") or "") or self.folder.resolve().name,
            status=status,
            subtitle=_subtitle(self.folder, record.began),
            message=message,
            changes=tuple(changes),
            facts=_facts(summary, record.start, record.last),
            training=training,
            validation=record.validation_series(),
            progress=progress,
            memory=memory,
            **settings,
            checkpoints=self._checkpoints(),
            repeat=str(summary.get("repeat") or f"zero-trial run {files.config_lock}") if lock or summary else "",
            lock=lock,
            created=format_time(time.time()),
            left_out=tuple(f"{name}: {why}" for name, why in self._left_out.items()),
        )

    def config(self) -> dict[str, Any]:
        """Return the experiment in the run's lock; empty where there is none, or it cannot be
        read."""
        with self._mutex:
            return self._lock()[1]

    def _lock(self) -> tuple[str, dict[str, Any]]:
        path = self._files.config_lock
        now = signature(path)
        if self._locked is None or self._locked[0] != now:
            self._left_out.pop(path.name, None)
            text = self._try(path, lambda: read_text(path, _MOST_LOCK), "")
            self._locked = now, text, self._try(path, lambda: read_lock(text, path), {})
        return self._locked[1:]

    def _try(self, path: Path, read: Callable[[], Found], default: Found) -> Found:
        """Return what ``read`` returns; note why if it fails, and return ``default``."""
        try:
            return read()
        except FileNotFoundError:
            pass
        except Exception as error:  # any: other releases write other records, and a file may hold anything
            self._left_out[path.name] = why_unreadable(error)
        return default

    def _object(self, path: Path) -> Record:
        found: object = self._try(path, lambda: json.loads(read_text(path)), {})
        if not isinstance(found, Mapping):
            self._left_out[path.name] = "not a JSON object"
        return mapping(found)

    def _read(self) -> None:
        """Read what is new; everything, if a file has become shorter or was replaced."""
        if self._events.replaced() or self._metrics.replaced():
            self._events = Tail(self._files.events, most=_MOST_BYTES)
            self._metrics = Tail(self._files.metrics, most=_MOST_BYTES)
            self._record = _Record()
        self._record.add(self._new(self._events), self._new(self._metrics))
        self._left_out |= self._record.left_out

    def _new(self, tail: Tail) -> Iterator[Record]:
        name, left_out = tail.path.name, self._record.left_out
        try:
            for line in tail.lines():
                record = json_line(line)
                if record is not None:
                    yield record
                elif line:
                    left_out[name] = "lines that are not JSON objects"
        except OSError as error:
            self._left_out[name] = why_unreadable(error)
        if tail.left_out:
            left_out[name] = tail.left_out

    def _checkpoints(self) -> tuple[CheckpointRow, ...]:
        """Return the checkpoints by step; one that was saved twice counts once."""
        found = []
        for name, (step, size) in self._record.checkpoints.items():
            kept = "/" not in name and os.path.isdir(self._files.checkpoints / name)
            found.append(CheckpointRow(step, name, size, kept))
        return tuple(sorted(found, key=lambda saved: saved.step))


class _Record:
    """What the events and validations of a run have said so far, without those that a later start
    has taken back."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.start: Record = {}
        self.plan: Record = {}
        self.last: Record = {}  # the newest event with a step, or any
        self.memory: Record = {}  # what earlier parts of a resumed run have measured
        self.checkpoints: dict[str, tuple[int, int | None]] = {}  # name -> step and bytes, the newest ones
        self.left_out: dict[str, str] = {}  # file -> what of it is not here
        self._training: dict[str, Curve] = {}
        self._reported: dict[str, Curve] = {}  # validations from metrics.jsonl
        self._announced: dict[str, Curve] = {}  # validations from events.jsonl, which count without the others

    def add(self, events: Iterable[Record], reports: Iterable[Record]) -> None:
        """Take what is new in events.jsonl and in metrics.jsonl."""
        starts: deque[Record] = deque(maxlen=_MOST_RECORDS)
        for event in events:
            self._add_event(event)
            if event.get("kind") == "start":
                starts.append(event)
        for record in heapq.merge(starts, reports, key=time_of):
            if record.get("kind") == "start":
                _rewind(self._reported, record.get("step"))
            elif record.get("group") == "validation":
                self._add_validation(self._reported, record)

    def _add_event(self, event: Record) -> None:
        kind, step = event.get("kind"), event.get("step")
        if self.began is None and is_finite(event.get("time")):
            self.began = event["time"]
        if is_finite(step) or not self.last:
            self.last = event
        if kind == "start":
            self.start = event
            _rewind(self._training, step)
            _rewind(self._announced, step)
        elif kind == "plan":
            self.plan = event
        elif kind == "memory":
            with suppress(TypeError):
                self.memory = join_memory(self.memory, [event])
        elif kind == "checkpoint" and is_finite(step):
            name = str(event.get("storage_id", ""))
            self.checkpoints.pop(name, None)
            self.checkpoints[name] = int(event["step"]), _whole(event.get("bytes"))
            if len(self.checkpoints) > _MOST_RECORDS:
                del self.checkpoints[next(iter(self.checkpoints))]
        elif kind == "train":
            self._add_training(event)
        elif kind == "validation":
            self._add_validation(self._announced, event)

    def _add_training(self, event: Record) -> None:
        single = mapping(event.get("each"))
        for name in dict.fromkeys(("loss", *PROGRESS, *single)):
            if name in event:
                self._add(self._training, name, event.get("step"), event[name], finite(single.get(name)))

    def _add_validation(self, curves: dict[str, Curve], record: Record) -> None:
        for name, value in mapping(record.get("metrics")).items():
            if name not in COUNTERS:
                self._add(curves, name, record.get("step"), value)

    def _add(self, curves: dict[str, Curve], name: str, step: Any, value: Any, single: Sequence[float] = ()) -> None:
        if name not in curves and len(curves) >= _MOST_CURVES:
            self.left_out["metrics"] = f"those after the first {_MOST_CURVES}"
            return
        curves.setdefault(name, Curve()).add(step, value, single)

    @property
    def _validation(self) -> dict[str, Curve]:
        return self._reported or self._announced

    def training_series(self) -> tuple[Series | None, tuple[Series, ...]]:
        """Return the loss and the other curves of the training. A value is the mean over ranks and
        over the steps since the last event, between the bounds of rank 0's single steps."""
        return training_series(self._training)

    def validations(self) -> list[Mapping[str, float]]:
        """Return the metrics of the first validation and of the newest, if that is another."""
        ends = {name: one.ends() for name, one in self._validation.items() if len(one)}
        steps = [step for pair in ends.values() for step, _ in pair]
        return [
            {name: value for name, pair in ends.items() for step, value in pair if step == at}
            for at in dict.fromkeys([min(steps), max(steps)] if steps else [])
        ]

    def best(self, searcher: Record) -> dict[str, float]:
        """Return the best validation of the searcher's metric, by its name."""
        name = str(searcher.get("metric"))
        found = (
            self._validation[name].best(bool(searcher.get("smaller_is_better", True)))
            if name in self._validation
            else None
        )
        return {name: found} if found is not None else {}

    def validation_series(self) -> tuple[Series, ...]:
        return tuple(one.series(name) for name, one in self._validation.items() if len(one))


def training_series(found: Mapping[str, Curve]) -> tuple[Series | None, tuple[Series, ...]]:
    """Return the loss, and what else is reported while a run trains: learning rate, gradient norm,
    speed, and every other metric of ``train_batch``."""
    curves = {name: one for name, one in found.items() if len(one)}
    unused = "samples_per_second" if "tokens_per_second" in curves else "tokens_per_second"
    shown = [name for name in (*PROGRESS, *curves) if name in curves and name not in ("loss", unused)]
    loss = curves["loss"].series("loss") if "loss" in curves else None
    return loss, tuple(curves[name].series(PROGRESS.get(name, name)) for name in dict.fromkeys(shown))


def mapping(value: Any) -> Record:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def time_of(record: Record) -> float:
    """Return when a record was written, in seconds since the epoch; 0 if that is not known."""
    return float(record["time"]) if is_finite(record.get("time")) else 0.0


def _rewind(curves: Mapping[str, Curve], step: Any) -> None:
    if is_finite(step):
        for one in curves.values():
            one.rewind(step)


def in_force(records: Sequence[Record]) -> list[Record]:
    """Return the records that count: a run that starts again from step s takes back its records of
    later steps."""
    found: list[Record] = []
    for record in records:
        if record.get("kind") == "start" and is_finite(record.get("step")):
            found = [
                earlier for earlier in found if not is_finite(earlier.get("step")) or earlier["step"] <= record["step"]
            ]
        found.append(record)
    return found


def _changes(summary: Record, reports: Sequence[Record], best: Record) -> tuple[MetricChange, ...]:
    first = mapping(summary.get("initial_validation")) or (reports[0] if len(reports) > 1 else {})
    last = mapping(summary.get("final_validation")) or (reports[-1] if reports else {})
    return tuple(
        MetricChange(
            str(name),
            float(first[name]) if is_finite(first.get(name)) else None,
            float(value),
            tuple(baselines(str(name), summary).items()),
            best.get(name),
        )
        for name, value in last.items()
        if is_finite(value)
    )


def _status(summary: Record, errors: Sequence[Record], last: Record, *, readable: bool) -> tuple[Status, str]:
    if errors:
        first = min(errors, key=time_of)
        step = f" (rank {first.get('rank', '?')}, step {first['step']})" if first.get("step") is not None else ""
        if first.get("exit_code") == ExitStatus.PREEMPTED:
            return Status("preempted, can be resumed", Tone.QUIET), ""
        return Status("failed", Tone.BAD), f"{first.get('message', 'unknown error')}{step}"
    if summary:
        end = str(summary.get("end") or "completed")
        return Status(end, Tone.GOOD if end == "completed" else Tone.QUIET), ""
    if not last and not readable:
        return Status("cannot be read", Tone.BAD), ""
    return Status("running, or killed" if last else "not started", Tone.BUSY), ""


def _subtitle(folder: Path, began: float | None) -> str:
    started = format_time(began) if began is not None else ""
    return " · ".join(
        part for part in (f"run {folder.resolve().name}", f"started {started}" if started else "") if part
    )


def _facts(summary: Record, start: Record, last: Record) -> tuple[tuple[str, str], ...]:
    """Return names and values; the first three are shown large."""
    step = summary.get("step", last.get("step"))
    total = summary.get("total_steps", start.get("total_steps"))
    speed = next((name for name in ("tokens_per_second", "samples_per_second") if is_finite(summary.get(name))), None)
    parameters = summary.get("parameters") or start.get("parameters") or 0
    found = [
        ("trained for", format_duration(summary["train_seconds"]) if is_finite(summary.get("train_seconds")) else None),
        ("steps", f"{step} of {total}" if step is not None else None),
        (speed.replace("_per_second", " per second") if speed else "", format_count(summary[speed]) if speed else None),
        ("parameters", format_count(parameters) if (summary or start) and is_finite(parameters) else None),
        ("ranks", summary.get("ranks")),
        ("ZeRO stage", summary.get("zero_stage")),
        ("global batch", summary.get("global_batch_size", start.get("global_batch_size"))),
        ("micro batch", summary.get("micro_batch_size")),
        ("accumulation", summary.get("gradient_accumulation_steps")),
        ("seed", summary.get("seed")),
    ]
    data = summary.get("data")
    if isinstance(data, Mapping):
        digest = str(data.get("sha256", ""))[:12]
        found.append(("data", " ".join(str(part) for part in (data.get("source", ""), digest) if part)))
    return tuple(
        (name, format_number(value) if isinstance(value, float) else str(value))
        for name, value in found
        if name and value is not None
    )


def _memory(summary: Record, plan: Record) -> Memory:
    parts = {name: int(value) for name, value in mapping(plan.get("figures")).items() if is_finite(value)}
    processes = summary.get("peak_memory_bytes")
    return Memory(
        parts=parts,
        planned=_whole(summary.get("memory_planned_bytes", parts.get("peak"))),
        measured=_whole(summary.get("memory_measured_peak_bytes")),
        processes=tuple(int(value) for value in processes if is_finite(value)) if isinstance(processes, list) else (),
        processes_kind=str(summary.get("peak_memory_kind") or ""),
    )


def _whole(value: Any) -> int | None:
    return int(value) if is_finite(value) else None


def settings_of(body: Record) -> dict[str, Any]:
    """Return ds_config's values, batch sizes and warnings of a resolved_config.json, as fields of
    a RunReport."""
    return {
        "settings": tuple(_setting(entry) for entry in body.get("values") or () if _counts(entry)),
        "batch": tuple(_setting(entry) for entry in body.get("batch") or ()),
        "warnings": tuple(str(warning) for warning in body.get("warnings") or ()),
    }


def _counts(entry: Any) -> bool:
    """Return whether to show a key: defaults count only if they have an effect and a value."""
    if not isinstance(entry, Mapping) or "key" not in entry:
        return False
    default = ValueSource(str(entry.get("source", "default"))).is_default
    return not default or (entry.get("value") is not None and entry.get("answer") in ("supported", "honoured"))


def _setting(entry: Record) -> Setting:
    source = ValueSource(str(entry.get("source", "")))
    key = str(entry.get("key", entry.get("name", "")))
    return Setting(key, entry.get("value"), source, str(entry.get("remark", "")), not source.is_default)


# A folder of runs as a sweep: whatever differs among their configurations was swept.


_IGNORED = ("data.zero_trial.",)  # the lock's own facts

_SECTIONS = ("hyperparameters", "data", "resources", "reproducibility", "searcher")


def from_runs(folder: Path) -> SweepReport:
    """Return the runs below ``folder``. Raises ConfigError if there are none."""
    paths = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    readers = {path.name: RunReader(path) for path in paths if is_run(path)}
    reports = {name: reader.report() for name, reader in readers.items()}
    if not reports:
        raise ConfigError(
            "there are no runs here",
            where=str(folder),
            expected="a folder of run folders, or an experiment's id",
        )
    return _as_sweep(folder.resolve().name, reports, {name: reader.config() for name, reader in readers.items()})


def _as_sweep(
    title: str,
    reports: Mapping[str, RunReport],
    configs: Mapping[str, Mapping[str, Any]],
) -> SweepReport:
    """Return runs, at least one, as a sweep. Raises ConfigError if their metrics differ."""
    metric, smaller = _goal(configs)
    points = {name: point(config) for name, config in configs.items()}
    axes = differing_axes(list(points.values()))
    swept = [axis.name for axis in axes]
    trials = tuple(
        _trial(name, report, {key: points[name][key] for key in swept if key in points[name]}, metric, smaller)
        for name, report in reports.items()
    )
    found = SweepReport(
        title=title,
        status=_status_folder_of_runs(trials),
        searcher="runs of a folder",
        metric=metric,
        smaller_is_better=smaller,
        trials=trials,
        throughput_unit="samples/s",
        axes=axes,
        subtitle=f"{len(trials)} runs",
        created=format_time(time.time()),
    )
    ranked = found.ranked()
    if not ranked:
        return found
    best = ranked[0].id
    return replace(found, best=_best(ranked[0], configs[best], metric), notes=reports[best].warnings)


def _goal(configs: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """Return the metric that all runs go by.

    Raises ConfigError where they go by different ones: they cannot be compared.
    """
    goals = {
        (str(s.get("metric", "validation_loss")), bool(s.get("smaller_is_better", True)))
        for config in configs.values()
        if (s := mapping(config.get("searcher")))
    }
    if len(goals) > 1:
        raise ConfigError(
            "the runs go by different metrics",
            where="searcher.metric",
            got=", ".join(sorted(name for name, _ in goals)),
            fix="Report on runs of one metric at a time.",
        )
    return goals.pop() if goals else ("validation_loss", True)


def point(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by dotted name, by which two runs can differ."""
    found = leaves({name: config[name] for name in _SECTIONS if isinstance(config.get(name), Mapping)})
    return {name: value for name, value in found.items() if not name.startswith(_IGNORED)}


def _trial(name: str, report: RunReport, point: Mapping[str, Any], metric: str, smaller: bool) -> TrialReport:
    curve = next((one for one in report.validation if one.name == metric), Series(metric, (), ()))
    bound = (min(curve.low or curve.values) if smaller else max(curve.high or curve.values)) if len(curve) else None
    speed = next((one for one in report.progress if one.name.endswith("per second")), None)
    facts = dict(report.facts)
    return TrialReport(
        id=name,
        status=report.status,
        point=point,
        curve=curve,
        best=bound,
        steps=_first_number(facts.get("steps", "0")),
        why=report.message.splitlines()[0] if report.message else "",
        left_out=report.left_out,
        memory=report.memory,
        throughput=sum(speed.values) / len(speed) if speed is not None and len(speed) else None,
    )


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0


def _status_folder_of_runs(trials: tuple[TrialReport, ...]) -> Status:
    if any(trial.status.tone is Tone.BUSY for trial in trials):
        return Status("running", Tone.BUSY)
    bad = sum(trial.status.tone is Tone.BAD for trial in trials)
    if bad:
        return Status(f"{bad} of {len(trials)} failed or cannot be read", Tone.BAD)
    return Status("completed", Tone.GOOD)


def _best(trial: TrialReport, config: Mapping[str, Any], metric: str) -> BestConfig:
    """Return the best run's lock without its own section: it repeats the run wherever the model's
    folder is."""
    data = {key: value for key, value in (config.get("data") or {}).items() if key != "zero_trial"}
    text = as_yaml({**config, "data": data}, f"run {trial.id}: zero-trial run best.yaml MODEL_DIR")
    value = trial.best if is_finite(trial.best) and trial.best is not None else float("nan")
    return BestConfig(trial.id, value, "best.yaml", text, "zero-trial run best.yaml MODEL_DIR")
