"""Read the folder of one run, finished, running, failed or preempted, or a folder of runs as a
sweep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.report.data import (
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
    leaves,
)
from zero_trial.runs.events import read_json, read_lines
from zero_trial.runs.layout import RunFolder
from zero_trial.runs.provenance import read_lock
from zero_trial.runs.records import COUNTERS, baselines, is_finite, join_memory
from zero_trial.schema.document import ValueSource
from zero_trial.util.text import format_count, format_duration, format_number

Record = Mapping[str, Any]


def is_run(folder: Path) -> bool:
    """Return whether a run has written into this folder."""
    files = RunFolder(folder)
    return any(path.is_file() for path in (files.events, files.metrics, files.config_lock))


def check_is_run(folder: Path) -> None:
    """Raise ConfigError unless a run has written into this folder."""
    if not is_run(folder):
        expected = "a run's folder, such as runs/0001"
        raise ConfigError("there is no run in this folder", where=str(folder), expected=expected)


def from_run_folder(folder: Path) -> RunReport:
    """Return everything that the folder has. Raises ConfigError if no run has been there."""
    check_is_run(folder)
    files = RunFolder(folder)
    events, summary, body = read_lines(files.events), read_json(files.summary), read_json(files.resolved_config)
    errors = [read_json(path) for path in files.error_files()]
    training, progress = _training(events)
    goal = (_config(folder).get("searcher") or {}).get("metric")
    changes = sorted(_changes(summary, _validations(folder, events)), key=lambda change: change.name != goal)
    status, message = _status(summary, errors, events)
    lock = read_text(files.config_lock)
    return RunReport(
        title=str(_config(folder).get("name") or "") or folder.resolve().name,
        status=status,
        subtitle=_subtitle(folder, events),
        message=message,
        changes=tuple(changes),
        facts=_facts(summary, events),
        training=training,
        validation=_validation_series(folder, events),
        progress=progress,
        memory=_memory(summary, events),
        settings=tuple(_setting(entry) for entry in body.get("values") or () if _counts(entry)),
        batch=tuple(_setting(entry) for entry in body.get("batch") or ()),
        warnings=tuple(str(warning) for warning in body.get("warnings") or ()),
        checkpoints=_checkpoints(folder, events),
        repeat=str(summary.get("repeat") or f"zero-trial run {files.config_lock}") if lock or summary else "",
        lock=lock,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def read_text(path: Path) -> str:
    """Return the text of a file; nothing if it does not exist."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def series(name: str, pairs: Iterable[tuple[Any, Any]]) -> Series:
    """Return a series of the pairs that can be drawn; of two at one step the later one counts."""
    kept = {float(step): float(value) for step, value in pairs if is_finite(step) and is_finite(value)}
    steps = tuple(sorted(kept))
    return Series(name, steps, tuple(kept[step] for step in steps))


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


def _training(events: Sequence[Record]) -> tuple[Series | None, tuple[Series, ...]]:
    """Return the loss with the values of single steps, and what else a run reports while it trains:
    learning rate, gradient norm, speed, and every other metric of ``train_batch``."""
    steps = [event for event in in_force(events) if event.get("kind") == "train"]
    speed = "tokens_per_second" if any("tokens_per_second" in event for event in steps) else "samples_per_second"
    names = {"lr": "learning rate", "grad_norm": "gradient norm", speed: speed.replace("_per_second", " per second")}
    own = dict.fromkeys(name for event in steps for name in event.get("each") or () if name not in names)
    loss = _with_single_steps("loss", steps)
    more = [series(shown, ((event.get("step"), event.get(key)) for event in steps)) for key, shown in names.items()]
    more += [_with_single_steps(str(name), steps) for name in own if name != "loss"]
    return (loss if len(loss) else None), tuple(one for one in more if len(one))


def _with_single_steps(name: str, events: Sequence[Record]) -> Series:
    """Return a metric of ``train_batch``: the mean over ranks and over the steps since the last
    event, and between which values rank 0's single steps are."""
    found = {
        float(event["step"]): event for event in events if is_finite(event.get("step")) and is_finite(event.get(name))
    }
    steps = tuple(sorted(found))
    values = tuple(float(found[step][name]) for step in steps)
    single = [
        [*_finite((found[step].get("each") or {}).get(name)), value] for step, value in zip(steps, values, strict=True)
    ]
    if all(len(each) < 3 for each in single):  # one step per event: there is nothing between
        return Series(name, steps, values)
    return Series(name, steps, values, tuple(map(min, single)), tuple(map(max, single)))


def _finite(values: Any) -> list[float]:
    return [float(value) for value in values if is_finite(value)] if isinstance(values, list) else []


def _validations(folder: Path, events: Sequence[Record]) -> list[tuple[Any, dict[str, Any]]]:
    """Return step and metrics of each validation that counts, from metrics.jsonl or, without it,
    from the events."""
    starts = [event for event in events if event.get("kind") == "start"]
    reports: list[Record] = [
        line for line in read_lines(RunFolder(folder).metrics) if line.get("group") == "validation"
    ]
    if not reports:
        reports = [event for event in events if event.get("kind") == "validation"]
    merged = in_force(sorted([*starts, *reports], key=lambda record: record.get("time") or 0.0))
    found = []
    for record in merged:
        if record.get("kind") != "start" and isinstance(record.get("metrics"), Mapping):
            found.append((record.get("step"), {k: v for k, v in record["metrics"].items() if k not in COUNTERS}))
    return found


def _validation_series(folder: Path, events: Sequence[Record]) -> tuple[Series, ...]:
    reports = _validations(folder, events)
    names = dict.fromkeys(name for _, metrics in reports for name in metrics)
    found = (series(str(name), ((step, metrics.get(name)) for step, metrics in reports)) for name in names)
    return tuple(one for one in found if len(one))


def _changes(summary: Record, reports: Sequence[tuple[Any, dict[str, Any]]]) -> tuple[MetricChange, ...]:
    first = dict(summary.get("initial_validation") or (reports[0][1] if len(reports) > 1 else {}))
    last = dict(summary.get("final_validation") or (reports[-1][1] if reports else {}))
    return tuple(
        MetricChange(
            str(name),
            float(first[name]) if is_finite(first.get(name)) else None,
            float(value),
            tuple(baselines(str(name), summary).items()),
        )
        for name, value in last.items()
        if is_finite(value)
    )


def _status(summary: Record, errors: Sequence[Record], events: Sequence[Record]) -> tuple[Status, str]:
    if errors:
        first = min(errors, key=lambda error: error.get("time") or 0.0)
        step = f" (rank {first.get('rank', '?')}, step {first['step']})" if first.get("step") is not None else ""
        if first.get("exit_code") == ExitStatus.PREEMPTED:
            return Status("preempted, can be resumed", Tone.QUIET), ""
        return Status("failed", Tone.BAD), f"{first.get('message', 'unknown error')}{step}"
    if summary:
        end = str(summary.get("end") or "completed")
        return Status(end, Tone.GOOD if end == "completed" else Tone.QUIET), ""
    return Status("running, or killed" if events else "not started", Tone.BUSY), ""


def _subtitle(folder: Path, events: Sequence[Record]) -> str:
    times = [event["time"] for event in events if is_finite(event.get("time"))]
    started = datetime.fromtimestamp(times[0], timezone.utc).strftime("%Y-%m-%d %H:%M UTC") if times else ""
    return " · ".join(
        part for part in (f"run {folder.resolve().name}", f"started {started}" if started else "") if part
    )


def _facts(summary: Record, events: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    """Return names and values; the first three are shown large."""
    start = next((event for event in reversed(events) if event.get("kind") == "start"), {})
    last = next((event for event in reversed(events) if is_finite(event.get("step"))), {})
    step = summary.get("step", last.get("step"))
    total = summary.get("total_steps", start.get("total_steps"))
    speed = next((name for name in ("tokens_per_second", "samples_per_second") if is_finite(summary.get(name))), None)
    stage = summary.get("zero_stage")
    found = [
        ("trained for", format_duration(summary["train_seconds"]) if is_finite(summary.get("train_seconds")) else None),
        ("steps", f"{step} of {total}" if step is not None else None),
        (speed.replace("_per_second", " per second") if speed else "", format_count(summary[speed]) if speed else None),
        (
            "parameters",
            format_count(summary.get("parameters") or start.get("parameters") or 0) if summary or start else None,
        ),
        ("ranks", summary.get("ranks")),
        ("ZeRO stage", stage),
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


def _memory(summary: Record, events: Sequence[Record]) -> Memory:
    plan: Record = next((event for event in reversed(events) if event.get("kind") == "plan"), {})
    summary = join_memory(summary, (event for event in events if event.get("kind") == "memory"))
    figures = plan.get("figures") if isinstance(plan.get("figures"), Mapping) else {}
    parts = {name: int(value) for name, value in (figures or {}).items() if is_finite(value)}
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


def _checkpoints(folder: Path, events: Sequence[Record]) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints by step; one that was saved twice counts once."""
    found: dict[str, CheckpointRow] = {}
    for event in events:
        if event.get("kind") == "checkpoint" and is_finite(event.get("step")):
            name = str(event.get("storage_id", ""))
            kept = "/" not in name and (RunFolder(folder).checkpoints / name).is_dir()
            found[name] = CheckpointRow(int(event["step"]), name, _whole(event.get("bytes")), kept)
    return tuple(sorted(found.values(), key=lambda saved: saved.step))


# A folder of runs as a sweep: whatever differs among their configurations was swept.


_IGNORED = ("data.zero_trial.",)  # the lock's own facts

_SECTIONS = ("hyperparameters", "data", "resources", "reproducibility", "searcher")


def from_runs(folder: Path) -> SweepReport:
    """Return the runs below ``folder``. Raises ConfigError if there are none."""
    paths = (
        sorted((path for path in folder.iterdir() if path.is_dir() and is_run(path)), key=lambda p: p.name)
        if folder.is_dir()
        else []
    )
    if not paths:
        raise ConfigError(
            "there are no runs here", where=str(folder), expected="a folder of run folders, or an experiment's id"
        )
    configs = {path.name: _config(path) for path in paths}
    metric, smaller = _goal(configs)
    points = {name: _point(config) for name, config in configs.items()}
    axes = differing_axes(list(points.values()))
    swept = [axis.name for axis in axes]
    reports = {path.name: from_run_folder(path) for path in paths}
    trials = tuple(
        _trial(name, report, {key: points[name][key] for key in swept if key in points[name]}, metric, smaller)
        for name, report in reports.items()
    )
    found = SweepReport(
        title=folder.resolve().name,
        status=_status_folder_of_runs(trials),
        searcher="runs of a folder",
        metric=metric,
        smaller_is_better=smaller,
        trials=trials,
        throughput_unit="samples/s",
        axes=axes,
        subtitle=f"{len(trials)} runs",
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    ranked = found.ranked()
    if not ranked:
        return found
    best = ranked[0].id
    return replace(found, best=_best(ranked[0], configs[best], metric), notes=reports[best].warnings)


def _config(folder: Path) -> dict[str, Any]:
    """Return the experiment in the run's lock; empty where there is none, or it cannot be read."""
    path = RunFolder(folder).config_lock
    try:
        return read_lock(read_text(path), path)
    except ConfigError:
        return {}


def _goal(configs: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """Return the metric that all runs go by.

    Raises ConfigError where they go by different ones: they cannot be compared.
    """
    goals = {
        (str(s.get("metric", "validation_loss")), bool(s.get("smaller_is_better", True)))
        for config in configs.values()
        if isinstance(s := config.get("searcher"), Mapping)
    }
    if len(goals) > 1:
        raise ConfigError(
            "the runs go by different metrics",
            where="searcher.metric",
            got=", ".join(sorted(name for name, _ in goals)),
            fix="Report on runs of one metric at a time.",
        )
    return goals.pop() if goals else ("validation_loss", True)


def _point(config: Mapping[str, Any]) -> dict[str, Any]:
    found = leaves({name: config[name] for name in _SECTIONS if isinstance(config.get(name), Mapping)})
    return {name: value for name, value in found.items() if not name.startswith(_IGNORED)}


def _trial(name: str, report: RunReport, point: Mapping[str, Any], metric: str, smaller: bool) -> TrialReport:
    curve = next((one for one in report.validation if one.name == metric), Series(metric, (), ()))
    best = (min if smaller else max)(curve.values) if len(curve) else None
    speed = next((one for one in report.progress if one.name.endswith("per second")), None)
    facts = dict(report.facts)
    return TrialReport(
        id=name,
        status=report.status,
        point=point,
        curve=curve,
        best=best,
        steps=_first_number(facts.get("steps", "0")),
        why=report.message.splitlines()[0] if report.message else "",
        memory=report.memory,
        throughput=sum(speed.values) / len(speed) if speed is not None and len(speed) else None,
    )


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0


def _status_folder_of_runs(trials: tuple[TrialReport, ...]) -> Status:
    if any(trial.status.tone is Tone.BUSY for trial in trials):
        return Status("running", Tone.BUSY)
    return Status("completed", Tone.GOOD)


def _best(trial: TrialReport, config: Mapping[str, Any], metric: str) -> BestConfig:
    """Return the best run's lock without its own section: it repeats the run wherever the model's
    folder is."""
    data = {key: value for key, value in (config.get("data") or {}).items() if key != "zero_trial"}
    text = as_yaml({**config, "data": data}, f"run {trial.id}: zero-trial run best.yaml MODEL_DIR")
    value = trial.best if is_finite(trial.best) and trial.best is not None else float("nan")
    return BestConfig(trial.id, value, "best.yaml", text, "zero-trial run best.yaml MODEL_DIR")
