"""Compare two runs: settings and code, then the first step with different values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.report.report_data import leaves
from zero_trial.report.run_reader import check_is_run, mapping
from zero_trial.trial.runs.events import COUNTERS, is_finite, read_json, read_lines, read_text
from zero_trial.trial.runs.provenance import read_lock
from zero_trial.trial.runs.run_layout import RunFolder

# The compared parts of a run: settings, provenance, data, and the values of every step.


Value = float | str | None

Steps = Mapping[int, Value]

# the path of the folder does not matter; the provenance has code and versions
_NO_SETTINGS = ("data.zero_trial.model_dir", "data.zero_trial.versions.")


@dataclass(frozen=True)
class Trace:
    """Values by step.

    ``local``: rank 0's own values, comparable only if both runs divide the work in the same way.
    """

    name: str
    steps: Steps
    local: bool = False


@dataclass(frozen=True)
class RunRecord:
    """One run.

    ``settings``: dotted key -> value. ``code``: file -> digest, None without provenance;
    ``whole_code``: False if the folder contained more files than were recorded. ``data``: the
    fingerprint that the trial reported at its end, else None.
    """

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
    """Read a run, finished or not. Raises ConfigError if the folder contains no run."""
    check_is_run(folder)
    starts = _mappings(read_json(RunFolder(folder).provenance).get("starts"))
    latest: Mapping[str, Any] = starts[-1] if starts else {}
    summary = read_json(RunFolder(folder).summary)
    code = mapping(latest.get("code"))
    data = summary.get("data")
    return RunRecord(
        folder,
        _settings(folder, latest),
        tuple(_traces(folder)),
        dict(code["files"]) if isinstance(code.get("files"), Mapping) else None,
        leaves({key: latest[key] for key in ("package", "versions", "machine") if key in latest}),
        leaves(data) if isinstance(data, Mapping) else None,
        str(summary["end"]) if summary.get("end") else None,
        max(1, len(starts)),
        code.get("complete") is not False,
    )


def _settings(folder: Path, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings and batch sizes from the lock; for a script, from the provenance."""
    path = RunFolder(folder).config_lock
    found = leaves(read_lock(read_text(path), path)) if path.is_file() else {}
    if not found:
        found = leaves({key: provenance[key] for key in ("hyperparameters", "seed", "ranks") if key in provenance})
    for row in _mappings(read_json(RunFolder(folder).resolved_config).get("batch")):
        found[f"batch: {row.get('name')}"] = row.get("value")
    return {key: value for key, value in found.items() if not key.startswith(_NO_SETTINGS)}


def _traces(folder: Path) -> list[Trace]:
    """Return rank 0's own values of every step, the values that events have for their last step,
    and reported metrics. When a run restarts from a step, its values of later steps are removed."""
    own: dict[str, dict[int, Value]] = {}
    last: dict[str, dict[int, Value]] = {"lr": {}, "grad_norm": {}}
    validated: dict[str, dict[int, Value]] = {}
    for event in read_lines(RunFolder(folder).events):
        kind, step = event.get("kind"), event.get("step")
        if kind == "start" and is_finite(step):
            for steps in (*own.values(), *last.values(), *validated.values()):
                for late in [at for at in steps if at > event["step"]]:
                    del steps[late]
        elif kind == "train" and isinstance(step, int):
            for name, values in mapping(event.get("each")).items():
                if isinstance(values, list):
                    first = step - len(values) + 1
                    own.setdefault(str(name), {}).update(enumerate(map(_value, values), first))
            for name, steps in last.items():
                if name in event:
                    steps[step] = _value(event[name])
        elif kind == "validation":
            _add(validated, event)
    means: dict[str, dict[int, Value]] = {}  # a restarted run removes its later reports
    for report in read_lines(RunFolder(folder).metrics):
        if report.get("group") == "training":
            _add(means, report)
    traces = [Trace(f"{name} of rank 0", steps, local=True) for name, steps in own.items()]
    traces += [Trace(name.replace("grad_norm", "gradient norm"), steps) for name, steps in last.items()]
    traces += [Trace(f"mean {name} of all ranks", steps) for name, steps in means.items()]
    traces += [Trace(name, steps) for name, steps in validated.items()]
    return [trace for trace in traces if trace.steps]


def _add(by_name: dict[str, dict[int, Value]], report: Mapping[str, Any]) -> None:
    step = report.get("step")
    for name, value in mapping(report.get("metrics")).items():
        if name not in COUNTERS and isinstance(step, int):
            by_name.setdefault(str(name), {})[step] = _value(value)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in a list; none if ``value`` is not a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _value(value: Any) -> Value:
    """Return a number as float, None as None, and anything else (``"inf"``) as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None if value is None else str(value)
    return float(value)


# The comparison.


ABSENT = "not there"

_SHARING = ("batch: data-parallel ranks", "batch: train_micro_batch_size_per_gpu", "resources.slots_per_trial", "ranks")
"""Settings by which ranks share the work: if they differ, rank 0 of one run has seen other samples
than rank 0 of the other."""


@dataclass(frozen=True)
class SettingChange:
    """One key; ``ABSENT`` marks a missing value."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two traces: at ``step``, after ``equal`` equal steps, the last of
    which is ``before`` (None if there is none).

    ``largest``: the largest difference over all common steps, at step ``at``; None if a value is
    not a number.
    """

    step: int
    a: Value
    b: Value
    before: int | None
    largest: float | None
    at: int

    @property
    def difference(self) -> float | None:
        return _gap(self.a, self.b)


@dataclass(frozen=True)
class TraceComparison:
    """A trace of both runs: the number of common steps, and the first difference, if any."""

    name: str
    steps: int
    parting: FirstDifference | None


@dataclass(frozen=True)
class RunDifference:
    """``notes``: items that could not be compared, with the reason.

    ``ends``: the last steps, if they differ.
    """

    settings: tuple[SettingChange, ...]
    code: tuple[SettingChange, ...]
    made_with: tuple[SettingChange, ...]
    data: tuple[SettingChange, ...]
    traces: tuple[TraceComparison, ...]
    ends: tuple[int, int] | None
    notes: tuple[str, ...]

    @property
    def first(self) -> TraceComparison | None:
        """Return the trace with the earliest difference."""
        parted = [(trace.parting.step, index) for index, trace in enumerate(self.traces) if trace.parting is not None]
        return self.traces[min(parted)[1]] if parted else None

    @property
    def same_origin(self) -> bool:
        """Return whether settings, code and data agree. Ignores the machine: whether runs on two
        machines agree is worth knowing."""
        return not (self.settings or self.code or self.data)

    @property
    def same_values(self) -> bool:
        """Return whether both runs have equally many steps (at least one) and all steps agree."""
        return self.first is None and self.ends is None and bool(self.traces)

    @property
    def same(self) -> bool:
        return self.same_origin and self.same_values


def compare_runs(a: RunRecord, b: RunRecord, rtol: float = 0.0) -> RunDifference:
    """Compare two runs.

    ``rtol``: values are equal if they differ by at most this fraction of the larger one; 0 requires
    bit-identical values.
    """
    settings = changes(a.settings, b.settings)
    notes = [*_not_compared(a, b)]
    shared_alike = not any(change.key in _SHARING for change in settings)
    traces = [
        _compare(one, other, rtol)
        for one in a.traces
        for other in b.traces
        if one.name == other.name and (shared_alike or not one.local)
    ]
    if not shared_alike and any(trace.local for trace in a.traces):
        notes.append(
            "the runs split the work over ranks differently: rank 0's own values are not compared, but means over all ranks are"
        )
    if not traces:
        notes.append("the runs have no values in common")
    ends = (a.last_step, b.last_step)
    return RunDifference(
        settings,
        changes(a.code, b.code) if a.code is not None and b.code is not None else (),
        changes(a.made_with, b.made_with) if a.made_with and b.made_with else (),
        changes(a.data, b.data) if a.data is not None and b.data is not None else (),
        tuple(trace for trace in traces if trace.steps),
        ends if ends[0] != ends[1] else None,
        tuple(notes),
    )


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Return the keys whose values differ, in ``a``'s order; 1 and 1.0 are the same."""
    keys = [*a, *(key for key in b if key not in a)]
    found = (SettingChange(key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys)
    return tuple(change for change in found if change.a != change.b)


def _not_compared(a: RunRecord, b: RunRecord) -> Sequence[str]:
    named = (("A", a), ("B", b))
    why = "no fingerprint of its data (a trial adds one at its end, as summary()['data'])"
    notes = [
        *_missing("code", [name for name, run in named if run.code is None], "no certificate.json"),
        *_missing("data", [name for name, run in named if run.data is None], why),
    ]
    notes += [
        f"{name}'s folder contains more code than was recorded: not all of it is compared"
        for name, run in named
        if not run.whole_code
    ]
    return notes + [
        f"{name} was started {run.starts} times; its last start is compared" for name, run in named if run.starts > 1
    ]


def _missing(what: str, runs: Sequence[str], why: str) -> Sequence[str]:
    verb = "has" if len(runs) == 1 else "have"
    return [f"{what} is not compared: {' and '.join(runs)} {verb} {why}"] if runs else []


def _compare(a: Trace, b: Trace, rtol: float) -> TraceComparison:
    common = sorted(a.steps.keys() & b.steps.keys())
    apart = [step for step in common if not _equal(a.steps[step], b.steps[step], rtol)]
    if not apart:
        return TraceComparison(a.name, len(common), None)
    before = [step for step in common if step < apart[0]]
    gaps = [(gap, step) for step in apart if (gap := _gap(a.steps[step], b.steps[step])) is not None]
    largest, at = max(gaps, default=(None, apart[0]), key=lambda pair: pair[0] or 0.0)
    step = apart[0]
    parting = FirstDifference(step, a.steps[step], b.steps[step], before[-1] if before else None, largest, at)
    return TraceComparison(a.name, len(common), parting)


def _equal(a: Value, b: Value, rtol: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rtol, abs_tol=0.0)
    return a == b


def _gap(a: Value, b: Value) -> float | None:
    """Return the absolute difference of two finite numbers; None for other values."""
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b):
        return abs(b - a)
    return None
