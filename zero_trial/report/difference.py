"""What differs between two runs: settings and code first, then the first step at which their values part. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.report.run_record import RunRecord, Trace, Value

ABSENT = "not there"
SHARING = ("batch: data-parallel ranks", "batch: train_micro_batch_size_per_gpu", "resources.slots_per_trial", "ranks")
"""Settings by which ranks share the work: where they differ, rank 0 of the one run has seen other samples than rank 0 of the other."""


@dataclass(frozen=True)
class Change:
    """One key; ``ABSENT`` stands for a value that a run does not have."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Parting:
    """Where two traces part: at ``step``, after ``equal`` compared steps of which ``before`` is the last (None if there is none).

    ``largest`` is the largest difference over all common steps and ``at`` its step; None where a value is not a number.
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
class Compared:
    """A trace that both runs have: how many steps both have, and where it parts, if it does."""

    name: str
    steps: int
    parting: Parting | None


@dataclass(frozen=True)
class Difference:
    """``notes``: what could not be compared, and why. ``ends``: the last steps, where they are not the same."""

    settings: tuple[Change, ...]
    code: tuple[Change, ...]
    made_with: tuple[Change, ...]
    data: tuple[Change, ...]
    traces: tuple[Compared, ...]
    ends: tuple[int, int] | None
    notes: tuple[str, ...]

    @property
    def first(self) -> Compared | None:
        """The trace that parts first."""
        parted = [(trace.parting.step, index) for index, trace in enumerate(self.traces) if trace.parting is not None]
        return self.traces[min(parted)[1]] if parted else None

    @property
    def same_origin(self) -> bool:
        """Settings, code and data; not the machine: runs may agree on two machines, and that is worth knowing."""
        return not (self.settings or self.code or self.data)

    @property
    def same_values(self) -> bool:
        """Of all steps that both have, of which there must be one, and as many steps."""
        return self.first is None and self.ends is None and bool(self.traces)

    @property
    def same(self) -> bool:
        return self.same_origin and self.same_values


def compare_runs(a: RunRecord, b: RunRecord, rtol: float = 0.0) -> Difference:
    """``rtol``: values count as equal when they differ by at most so much of the larger one; 0 compares bits."""
    settings = changes(a.settings, b.settings)
    notes = [*_not_compared(a, b)]
    shared_alike = not any(change.key in SHARING for change in settings)
    traces = [
        _compare(one, other, rtol)
        for one in a.traces
        for other in b.traces
        if one.name == other.name and (shared_alike or not one.local)
    ]
    if not shared_alike and any(trace.local for trace in a.traces):
        notes.append(
            "the ranks share the work in another way: rank 0's own values are not compared, means of all ranks are"
        )
    if not traces:
        notes.append("the runs have no values in common")
    ends = (a.last_step, b.last_step)
    return Difference(
        settings,
        changes(a.code, b.code) if a.code is not None and b.code is not None else (),
        changes(a.made_with, b.made_with) if a.made_with and b.made_with else (),
        changes(a.data, b.data) if a.data is not None and b.data is not None else (),
        tuple(trace for trace in traces if trace.steps),
        ends if ends[0] != ends[1] else None,
        tuple(notes),
    )


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    """The keys whose values differ, in ``a``'s order; 1 and 1.0 are the same."""
    keys = [*a, *(key for key in b if key not in a)]
    found = (Change(key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys)
    return tuple(change for change in found if change.a != change.b)


def _not_compared(a: RunRecord, b: RunRecord) -> Sequence[str]:
    named = (("A", a), ("B", b))
    why = "no fingerprint of its data (a trial gives one at its end, as summary()['data'])"
    notes = [
        *_missing("code", [name for name, run in named if run.code is None], "no certificate"),
        *_missing("data", [name for name, run in named if run.data is None], why),
    ]
    notes += [
        f"{name}'s folder holds more code than is noted: not all is compared"
        for name, run in named
        if not run.whole_code
    ]
    return notes + [
        f"{name} was started {run.starts} times; its last start is compared" for name, run in named if run.starts > 1
    ]


def _missing(what: str, runs: Sequence[str], why: str) -> Sequence[str]:
    verb = "has" if len(runs) == 1 else "have"
    return [f"{what} is not compared: {' and '.join(runs)} {verb} {why}"] if runs else []


def _compare(a: Trace, b: Trace, rtol: float) -> Compared:
    common = sorted(a.steps.keys() & b.steps.keys())
    apart = [step for step in common if not _equal(a.steps[step], b.steps[step], rtol)]
    if not apart:
        return Compared(a.name, len(common), None)
    before = [step for step in common if step < apart[0]]
    gaps = [(gap, step) for step in apart if (gap := _gap(a.steps[step], b.steps[step])) is not None]
    largest, at = max(gaps, default=(None, apart[0]), key=lambda pair: pair[0] or 0.0)
    step = apart[0]
    parting = Parting(step, a.steps[step], b.steps[step], before[-1] if before else None, largest, at)
    return Compared(a.name, len(common), parting)


def _equal(a: Value, b: Value, rtol: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rtol, abs_tol=0.0)
    return a == b


def _gap(a: Value, b: Value) -> float | None:
    """B less A, without its sign; None unless both are finite numbers."""
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b):
        return abs(b - a)
    return None
