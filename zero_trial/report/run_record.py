"""What a run's folder holds that another run can be compared with: settings, certificate, data, and the values of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.config.yaml_text import read_yaml
from zero_trial.errors import ConfigError
from zero_trial.report.run_folder import COUNTERS, LOCK, in_force, is_run, read_json, read_lines, read_text

Value = float | str | None
Steps = Mapping[int, Value]

CERTIFICATE = "certificate.json"
MODEL_DIR = "data.zero_trial.model_dir"  # where it lies says nothing of what is in it; the certificate has its code
VERSIONS = "data.zero_trial.versions."


@dataclass(frozen=True)
class Trace:
    """Values by step. ``local``: rank 0's own, which mean the same only where the ranks share the work in the same way."""

    name: str
    steps: Steps
    local: bool = False


@dataclass(frozen=True)
class RunRecord:
    """One run. ``settings``: dotted key -> value. ``code``: file -> digest, None without a certificate; ``whole_code``: whether it is all of
    it, or the folder held more than is noted. ``data``: the fingerprint that the
    trial gave when it ended, None if it did not."""

    folder: Path
    settings: Mapping[str, Any]
    traces: Sequence[Trace]
    code: Mapping[str, str] | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    end: str | None = None
    starts: int = 1
    whole_code: bool = True

    @property
    def last_step(self) -> int:
        return max((step for trace in self.traces for step in trace.steps), default=0)


def read_run(folder: Path) -> RunRecord:
    """Of a run that has finished, or goes on, or has failed. Raises ConfigError if there is none."""
    if not is_run(folder):
        raise ConfigError(
            "there is no run in this folder", where=str(folder), expected="a run's folder, such as runs/0001"
        )
    starts = _mappings(read_json(folder / CERTIFICATE).get("starts"))
    latest: Mapping[str, Any] = starts[-1] if starts else {}
    summary = read_json(folder / "summary.json")
    code = latest.get("code")
    data = summary.get("data")
    return RunRecord(
        folder,
        _settings(folder, latest),
        tuple(_traces(folder)),
        dict(code["files"]) if isinstance(code, Mapping) and isinstance(code.get("files"), Mapping) else None,
        flatten({key: latest[key] for key in ("package", "versions", "machine") if key in latest}),
        flatten(data) if isinstance(data, Mapping) else None,
        str(summary["end"]) if summary.get("end") else None,
        max(1, len(starts)),
        not (isinstance(code, Mapping) and code.get("complete") is False),
    )


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty one is a value of its own."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            found |= flatten(item, f"{name}.")
        else:
            found[name] = item
    return found


def _settings(folder: Path, certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Of the lock file and the batch sizes that came of it; a script's run has only what the certificate says."""
    lock = read_text(folder / LOCK)
    found = flatten(read_yaml(lock, str(folder / LOCK)).value) if lock else {}
    if not found:
        found = flatten({key: certificate[key] for key in ("hyperparameters", "seed", "ranks") if key in certificate})
    for row in _mappings(read_json(folder / "resolved_config.json").get("batch")):
        found[f"batch: {row.get('name')}"] = row.get("value")
    return {key: value for key, value in found.items() if key != MODEL_DIR and not key.startswith(VERSIONS)}


def _traces(folder: Path) -> list[Trace]:
    events = read_lines(folder / "events.jsonl")
    starts = [event for event in events if event.get("kind") == "start"]
    reports = read_lines(folder / "metrics.jsonl")
    said = in_force(sorted([*starts, *reports], key=_time))
    traces = _each_step(in_force(events))
    for group, word in (("training", "mean {} of all ranks"), ("validation", "{}")):
        by_name: dict[str, dict[int, Value]] = {}
        for report in said:
            if report.get("group") == group and isinstance(report.get("metrics"), Mapping):
                for name, value in report["metrics"].items():
                    if name not in COUNTERS and isinstance(report.get("step"), int):
                        by_name.setdefault(str(name), {})[report["step"]] = _value(value)
        traces += [Trace(word.format(name), steps) for name, steps in by_name.items()]
    return [trace for trace in traces if trace.steps]


def _each_step(events: Sequence[Mapping[str, Any]]) -> list[Trace]:
    """Rank 0's own values of every step, and what an event says of the last step before it."""
    own: dict[str, dict[int, Value]] = {}
    last: dict[str, dict[int, Value]] = {"lr": {}, "grad_norm": {}}
    for event in events:
        step = event.get("step")
        if event.get("kind") != "train" or not isinstance(step, int):
            continue
        each = event.get("each")
        for name, values in each.items() if isinstance(each, Mapping) else ():
            if isinstance(values, list):
                first = step - len(values) + 1
                own.setdefault(str(name), {}).update(
                    (first + index, _value(value)) for index, value in enumerate(values)
                )
        for name, steps in last.items():
            if name in event:
                steps[step] = _value(event[name])
    traces = [Trace(f"{name} of rank 0", steps, local=True) for name, steps in own.items()]
    return traces + [Trace(name.replace("grad_norm", "gradient norm"), steps) for name, steps in last.items()]


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """Those in a list; none in anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _time(record: Mapping[str, Any]) -> float:
    time = record.get("time")
    return float(time) if isinstance(time, (int, float)) else 0.0


def _value(value: Any) -> Value:
    """A number as float; what is none (``"inf"``, None) as it is, as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None if value is None else str(value)
    return float(value)
