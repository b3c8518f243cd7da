"""Read the folder of a run, or a folder of runs as a sweep and for the board."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.report.report_data import (
    BestConfig,
    CheckpointRow,
    Curve,
    Memory,
    MetricChange,
    OutputLine,
    Overview,
    OverviewRow,
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

_MOST_BYTES = 256 << 20  # of events.jsonl
_MOST_LOCK = 1 << 20  # bytes
_FIRST_BYTES = 128 * 1024  # of a log, when the page is opened


def is_run(folder: Path) -> bool:
    """Return whether this folder is, or (if unreadable) may be, the folder of a run."""
    files = RunFolder(folder)
    try:
        return any(path.is_file() for path in (files.events, files.metrics, files.config_lock))
    except OSError:
        return True


def check_is_run(folder: Path) -> None:
    """Raise ConfigError unless a run has written into this folder."""
    if not is_run(folder):
        expected = "a run's folder, such as runs/0001"
        raise ConfigError("this folder contains no run", where=str(folder), expected=expected)


def from_run_folder(folder: Path) -> RunReport:
    """Return everything in the folder; ``left_out`` lists unreadable files. Raises ConfigError if
    it is not the folder of a run."""
    check_is_run(folder)
    return _RunReader(folder).report()


class _RunReader:
    """One reading of a run's folder. Unreadable files do not affect the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = RunFolder(folder)
        self.left_out: dict[str, str] = {}  # file -> why all or part of it is missing in the report
        self.began: float | None = None
        self.start: Record = {}
        self.plan: Record = {}
        self.last: Record = {}  # the newest event with a step, else the newest event
        self.memory: Record = {}  # measured by earlier parts of a resumed run
        self.saved: dict[str, tuple[int, int | None]] = {}  # checkpoint -> step and bytes
        self.training: dict[str, Curve] = {}
        self.validation: dict[str, Curve] = {}

    def report(self) -> RunReport:
        """Return everything in the folder."""
        files = self.files
        self._try(files.events, self._read_events, None)
        summary, body = self._object(files.summary), self._object(files.resolved_config)
        errors = [self._object(path) for path in files.error_files()]
        lock = self._try(files.config_lock, lambda: read_text(files.config_lock, _MOST_LOCK), "")
        config: dict[str, Any] = self._try(files.config_lock, lambda: read_lock(lock, files.config_lock), {})
        training, progress = training_series(self.training)
        status, message = _status(summary, errors, self.last, readable=not self.left_out)
        memory = self._try(files.summary, lambda: _memory(join_memory(summary, [self.memory]), self.plan), Memory())
        settings: dict[str, Any] = self._try(files.resolved_config, lambda: settings_of(body), {})
        started = [f"started {format_time(self.began)}"] if self.began is not None else []
        return RunReport(
            title=str(config.get("name") or "") or self.folder.resolve().name,
            status=status,
            subtitle=" · ".join([f"run {self.folder.resolve().name}", *started]),
            message=message,
            changes=self._changes(summary, mapping(config.get("searcher"))),
            facts=_facts(summary, self.start, self.last),
            training=training,
            validation=tuple(one.series(name) for name, one in self.validation.items() if len(one)),
            progress=progress,
            memory=memory,
            **settings,
            checkpoints=self._checkpoints(),
            repeat=str(summary.get("repeat") or f"zero-trial run {files.config_lock}") if lock or summary else "",
            lock=lock,
            created=format_time(time.time()),
            left_out=tuple(f"{name}: {why}" for name, why in self.left_out.items()),
            config=config,
            began=self.began,
        )

    def _try(self, path: Path, read: Callable[[], Found], default: Found) -> Found:
        """Return ``read()``; if it fails, record the reason and return ``default``."""
        try:
            return read()
        except FileNotFoundError:
            pass
        except Exception as error:  # any: other releases write other records, and a file can contain anything
            self.left_out[path.name] = _why_unreadable(error)
        return default

    def _object(self, path: Path) -> Record:
        found: object = self._try(path, lambda: json.loads(read_text(path)), {})
        if not isinstance(found, Mapping):
            self.left_out[path.name] = "not a JSON object"
        return mapping(found)

    def _read_events(self) -> None:
        tail = Tail(self.files.events, most=_MOST_BYTES)
        for line in tail.lines():
            event = json_line(line)
            if event is not None:
                self._add(event)
            elif line:
                self.left_out[tail.path.name] = "lines that are not JSON objects"
        if tail.left_out:
            self.left_out[tail.path.name] = tail.left_out

    def _add(self, event: Record) -> None:
        kind, step = event.get("kind"), event.get("step")
        if self.began is None and is_finite(event.get("time")):
            self.began = event["time"]
        if is_finite(step) or not self.last:
            self.last = event
        if kind == "start":
            self.start = event
            if is_finite(step):  # a run that restarts there discards later values
                for one in (*self.training.values(), *self.validation.values()):
                    one.rewind(event["step"])
        elif kind == "plan":
            self.plan = event
        elif kind == "memory":
            with suppress(TypeError):
                self.memory = join_memory(self.memory, [event])
        elif kind == "checkpoint" and is_finite(step):
            name = str(event.get("storage_id", ""))
            self.saved[name] = int(event["step"]), whole(event.get("bytes"))
        elif kind == "train":
            single = mapping(event.get("each"))  # rank 0's values of each step since the last event
            for name in dict.fromkeys(("loss", *PROGRESS, *single)):
                if name in event:
                    values = single[name] if isinstance(single.get(name), list) else ()
                    self.training.setdefault(name, Curve()).add(step, event[name], list(filter(is_finite, values)))
        elif kind == "validation":
            for name, value in mapping(event.get("metrics")).items():
                if name not in COUNTERS:
                    self.validation.setdefault(name, Curve()).add(step, value)

    def _changes(self, summary: Record, searcher: Record) -> tuple[MetricChange, ...]:
        """Return the first and the last value of each validation metric, the searcher's first."""
        goal, smaller = searcher.get("metric"), bool(searcher.get("smaller_is_better", True))
        ends = {name: one.ends() for name, one in self.validation.items() if len(one)}
        steps = [step for pair in ends.values() for step, _ in pair]
        newest, oldest = max(steps, default=0.0), min(steps, default=0.0)
        last = mapping(summary.get("final_validation")) or {
            name: end[1] for name, (_, end) in ends.items() if end[0] == newest
        }
        first = mapping(summary.get("initial_validation")) or {
            name: begin[1] for name, (begin, _) in ends.items() if begin[0] == oldest < newest
        }
        found = [
            MetricChange(
                str(name),
                float(first[name]) if is_finite(first.get(name)) else None,
                float(value),
                tuple(baselines(str(name), summary).items()),
                self.validation[name].best(smaller) if name == goal and name in self.validation else None,
            )
            for name, value in last.items()
            if is_finite(value)
        ]
        return tuple(sorted(found, key=lambda change: change.name != goal))

    def _checkpoints(self) -> tuple[CheckpointRow, ...]:
        """Return the checkpoints by step, without duplicates."""
        found = []
        for name, (step, size) in self.saved.items():
            kept = "/" not in name and os.path.isdir(self.files.checkpoints / name)
            found.append(CheckpointRow(step, name, size, kept))
        return tuple(sorted(found, key=lambda saved: saved.step))


def _why_unreadable(error: Exception) -> str:
    """Return in one line why a file of a run cannot be read."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = " ".join(str(error).split())
    return said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"


def training_series(found: Mapping[str, Curve]) -> tuple[Series | None, tuple[Series, ...]]:
    """Return the loss, and all other series of training: learning rate, gradient norm, speed, and
    every other metric of ``train_batch``."""
    curves = {name: one for name, one in found.items() if len(one)}
    unused = "samples_per_second" if "tokens_per_second" in curves else "tokens_per_second"
    shown = [name for name in (*PROGRESS, *curves) if name in curves and name not in ("loss", unused)]
    loss = curves["loss"].series("loss") if "loss" in curves else None
    return loss, tuple(curves[name].series(PROGRESS.get(name, name)) for name in dict.fromkeys(shown))


def mapping(value: Any) -> Record:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _status(summary: Record, errors: Sequence[Record], last: Record, *, readable: bool) -> tuple[Status, str]:
    if errors:
        first = min(errors, key=lambda error: error["time"] if is_finite(error.get("time")) else 0.0)
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


def _facts(summary: Record, start: Record, last: Record) -> tuple[tuple[str, str], ...]:
    """Return names and values; pages show the first three large."""
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
        planned=whole(summary.get("memory_planned_bytes", parts.get("peak"))),
        measured=whole(summary.get("memory_measured_peak_bytes")),
        processes=tuple(int(value) for value in processes if is_finite(value)) if isinstance(processes, list) else (),
        processes_kind=str(summary.get("peak_memory_kind") or ""),
    )


def whole(value: Any) -> int | None:
    """Return a finite number as an integer, else None."""
    return int(value) if is_finite(value) else None


def settings_of(body: Record) -> dict[str, Any]:
    """Return the values, batch sizes and warnings of resolved_config.json for a RunReport."""
    return {
        "settings": tuple(_setting(entry) for entry in body.get("values") or () if _counts(entry)),
        "batch": tuple(_setting(entry) for entry in body.get("batch") or ()),
        "warnings": tuple(str(warning) for warning in body.get("warnings") or ()),
    }


def _counts(entry: Any) -> bool:
    """Return whether to show a key: defaults only if they have an effect and a value."""
    if not isinstance(entry, Mapping) or "key" not in entry:
        return False
    default = ValueSource(str(entry.get("source", "default"))).is_default
    return not default or (entry.get("value") is not None and entry.get("answer") in ("supported", "honoured"))


def _setting(entry: Record) -> Setting:
    source = ValueSource(str(entry.get("source", "")))
    key = str(entry.get("key", entry.get("name", "")))
    return Setting(key, entry.get("value"), source, str(entry.get("remark", "")), not source.is_default)


# A folder of runs as a sweep over the values that differ between their configurations.


def runs_in(folder: Path) -> dict[str, Path]:
    """Return the runs directly below a folder by name, sorted."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path for path in paths if path.is_dir() and is_run(path)}


def from_runs(folder: Path) -> SweepReport:
    """Return the runs below ``folder``. Raises ConfigError if there are none or metrics differ."""
    reports = {name: from_run_folder(path) for name, path in runs_in(folder).items()}
    if not reports:
        raise ConfigError(
            "no runs were found here",
            where=str(folder),
            expected="a folder of run folders, or an experiment's id",
        )
    metric, smaller = _goal(reports.values())
    points = {name: report.point() for name, report in reports.items()}
    axes = differing_axes(list(points.values()))
    swept = [axis.name for axis in axes]
    trials = tuple(
        _trial(name, report, {key: points[name][key] for key in swept if key in points[name]}, metric, smaller)
        for name, report in reports.items()
    )
    tones = [trial.status.tone for trial in trials]
    status = Status("running", Tone.BUSY) if Tone.BUSY in tones else Status("completed", Tone.GOOD)
    if Tone.BUSY not in tones and (bad := tones.count(Tone.BAD)):
        status = Status(f"{bad} of {len(trials)} failed or cannot be read", Tone.BAD)
    found = SweepReport(
        title=folder.resolve().name,
        status=status,
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
    best, config = ranked[0], reports[ranked[0].id].config
    # without the zero_trial section, the lock works wherever the model's folder is
    data = {key: value for key, value in (config.get("data") or {}).items() if key != "zero_trial"}
    text = as_yaml({**config, "data": data}, f"run {best.id}")
    return replace(found, best=BestConfig(best.id, best.best or 0.0, text), notes=reports[best.id].warnings)


def _goal(reports: Iterable[RunReport]) -> tuple[str, bool]:
    """Return the metric of all runs, and whether smaller values are better.

    Raises ConfigError if the metrics differ, because such runs cannot be compared.
    """
    goals = {
        (str(s.get("metric", "validation_loss")), bool(s.get("smaller_is_better", True)))
        for report in reports
        if (s := mapping(report.config.get("searcher")))
    }
    if len(goals) > 1:
        raise ConfigError(
            "the runs use different metrics",
            where="searcher.metric",
            got=", ".join(sorted(name for name, _ in goals)),
            fix="Write a report of runs with one metric at a time.",
        )
    return goals.pop() if goals else ("validation_loss", True)


def _trial(name: str, report: RunReport, point: Mapping[str, Any], metric: str, smaller: bool) -> TrialReport:
    curve = next((one for one in report.validation if one.name == metric), Series(metric, (), ()))
    bound = (min(curve.low or curve.values) if smaller else max(curve.high or curve.values)) if len(curve) else None
    speed = next((one for one in report.progress if one.name.endswith("per second")), None)
    return TrialReport(
        id=name,
        status=report.status,
        point=point,
        curve=curve,
        best=bound,
        steps=report.steps[0],
        why=report.message.splitlines()[0] if report.message else "",
        left_out=report.left_out,
        memory=report.memory,
        throughput=sum(speed.values) / len(speed) if speed is not None and len(speed) else None,
    )


# A folder of runs on the board.


class RunsSource:
    """The runs in a folder, or the folder itself as the only run.

    Only listed names are valid, so a name cannot point outside the folder. A run's report is cached
    until its files change.
    """

    unit = "run"

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                "the folder does not exist", where="FOLDER", got=str(folder), expected="a folder of runs, such as runs"
            )
        self._folder = folder
        self._reports: dict[str, tuple[object, RunReport]] = {}

    def _runs(self) -> dict[str, Path]:
        found = runs_in(self._folder)
        if not found and is_run(self._folder):
            found = {self._folder.resolve().name: self._folder}
        self._reports = {name: held for name, held in self._reports.items() if name in found}
        return found

    def _run(self, name: str) -> Path:
        found = self._runs().get(name)
        if found is None:
            raise ConfigError("the run does not exist", where="name", got=name[:80])
        return found

    def _report(self, name: str, path: Path) -> RunReport:
        now = _signature(path)  # before reading, so that later writes are read next time
        held = self._reports.get(name)
        if held is None or held[0] != now:
            held = self._reports[name] = now, from_run_folder(path)
        return held[1]

    def version(self) -> object:
        return tuple((name, _signature(path)) for name, path in self._runs().items())

    def overview(self) -> Overview:
        rows = []
        for name, path in reversed(self._runs().items()):
            with suppress(ConfigError):  # removed after it was listed
                rows.append(_row(name, self._report(name, path)))
        return Overview("Runs", str(self._folder.resolve()), "run", tuple(rows), "zero-trial run const.yaml MODEL_DIR")

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> SweepReport:
        raise ConfigError("the experiment does not exist", where="name", got=name[:80])

    def run(self, name: str) -> RunReport:
        return self._report(name, self._run(name))

    def log(self, name: str) -> Iterator[list[OutputLine]]:
        return _rank_logs(RunFolder(self._run(name)))


def _signature(folder: Path) -> tuple[object, ...]:
    """Return a value that changes when a file of the report changes."""
    files = RunFolder(folder)
    paths = (files.events, files.summary, files.errors, files.checkpoints, files.config_lock, files.resolved_config)
    return tuple(map(signature, paths))


def _row(name: str, report: RunReport) -> OverviewRow:
    change = report.changes[0] if report.changes else None
    loss = report.training.values[-1] if report.training is not None and len(report.training) else None
    done, total = report.steps
    return OverviewRow(
        name=name,
        title=" · ".join([*([report.title] if report.title != name else []), *report.left_out]),
        status=report.status,
        done=done / total if total else None,
        metric=change.name if change is not None else "loss" if loss is not None else "",
        best=change.after if change is not None else loss,
        steps=dict(report.facts).get("steps", ""),
        started=report.began,
    )


def _rank_logs(files: RunFolder) -> Iterator[list[OutputLine]]:
    """Yield the newest lines of each rank's output, then new lines."""
    tails: dict[int, Tail] = {}
    unreadable: set[int] = set()  # ranks whose log is known to be unreadable
    while True:
        found: list[OutputLine] = []
        newest = None if tails else _FIRST_BYTES
        for rank in itertools.count():
            path = files.log(rank)
            if rank not in tails:
                if not os.path.lexists(path):
                    break
                tails[rank] = Tail(path, newest=newest)
            try:
                found += [OutputLine(line, rank) for line in tails[rank].lines()]
            except OSError as error:
                if rank not in unreadable:
                    found.append(OutputLine(f"{path.name} cannot be read: {_why_unreadable(error)}", rank))
                unreadable.add(rank)
        yield found
