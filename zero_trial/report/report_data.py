"""What a report shows, as frozen values: one run, or the trials and decisions of a sweep.

Pages show nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from zero_trial.experiment.space import find_ranges
from zero_trial.schema.config_source import write_yaml
from zero_trial.util.text import format_value


class Tone(str, Enum):
    """How a state is drawn: it went well, is under way, was ended on purpose, or went wrong."""

    GOOD = "good"
    BUSY = "busy"
    QUIET = "quiet"
    BAD = "bad"


@dataclass(frozen=True)
class Status:
    """A state in a word or two."""

    word: str
    tone: Tone


@dataclass(frozen=True)
class Series:
    """A named quantity over steps, both of one length; only finite values, steps rise.

    ``low`` and ``high``: between which single values are that a value is the mean of; empty where
    there are none. ``last``: the last value, where the last of ``values`` is a mean of several.
    """

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    last: float | None = None

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0.

    ``parts`` of the plan by name; ``processes`` is what each rank's process or device held at its
    peak.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    planned: int | None = None
    measured: int | None = None
    limit_line: str = ""
    processes: tuple[int, ...] = ()
    processes_kind: str = ""


@dataclass(frozen=True)
class Setting:
    """One ds_config value, where it came from, and a remark; ``given`` if it was written or
    filled in.
    """

    key: str
    value: Any
    source: str
    remark: str
    given: bool


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint that was written; ``kept`` if it is still there."""

    step: int
    name: str
    bytes: int | None
    kept: bool


@dataclass(frozen=True)
class MetricChange:
    """A validation metric before and after, with the baselines that give it a meaning. ``best``: of
    the searcher's metric alone."""

    name: str
    before: float | None
    after: float
    baselines: tuple[tuple[str, float], ...] = ()
    best: float | None = None


@dataclass(frozen=True)
class RunReport:
    """One run.

    Series that were not recorded are empty; ``facts`` are name and value in the order to show them.
    """

    title: str
    status: Status
    subtitle: str = ""
    message: str = ""  # what went wrong
    changes: tuple[MetricChange, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    training: Series | None = None
    validation: tuple[Series, ...] = ()
    progress: tuple[Series, ...] = ()  # learning rate, gradient norm, throughput
    memory: Memory = Memory()
    settings: tuple[Setting, ...] = ()
    batch: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    repeat: str = ""
    lock: str = ""  # the file that repeats the run
    created: str = ""
    left_out: tuple[str, ...] = ()  # files that cannot be read, with the reason


@dataclass(frozen=True)
class TrialReport:
    """One point of a sweep.

    ``point``: the swept values by dotted name. ``best`` is the searcher's metric as it was
    reported.
    """

    id: str
    status: Status
    point: Mapping[str, Any]
    curve: Series
    best: float | None = None
    steps: int = 0
    why: str = ""  # why it ended as it did
    left_out: tuple[str, ...] = ()  # files that cannot be read, with the reason
    pruned: bool = False
    memory: Memory = Memory()
    throughput: float | None = None
    restarts: int = 0
    seconds: float | None = None


class RungOutcome(str, Enum):
    """What the search decided about a trial."""

    WENT_ON = "went on"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True)
class RungDecision:
    """One decision of the search: when (in units of training) and why, in a sentence."""

    trial: str
    verdict: RungOutcome
    bracket: int
    rung: int
    units: int
    metric: float
    why: str


@dataclass(frozen=True)
class BracketHistory:
    """One bracket: how much training each rung asks for, and its decisions in the order in which
    they were taken.
    """

    number: int
    units: tuple[int, ...]
    decisions: tuple[RungDecision, ...]


@dataclass(frozen=True)
class Axis:
    """A swept leaf: numbers, on a logarithmic scale or not, or ``choices``."""

    name: str
    log: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class BestConfig:
    """The winner as a file: ``text`` runs with ``command``."""

    trial: str
    metric: float
    filename: str
    text: str
    command: str


@dataclass(frozen=True)
class SweepReport:
    """A search and all its trials.

    ``drawn``: what the trials' curves are of, if that is not ``metric``.
    ``pruned``: reasons why points were never launched, with how often. ``notes``: warnings about
    the best, such as a learning rate of its point that its scheduler has replaced.
    """

    title: str
    status: Status
    searcher: str
    metric: str
    smaller_is_better: bool
    trials: tuple[TrialReport, ...]
    unit: str = "batches"  # of steps and rungs
    throughput_unit: str = "steps/s"
    axes: tuple[Axis, ...] = ()
    ladders: tuple[BracketHistory, ...] = ()
    pruned: tuple[tuple[str, int], ...] = ()
    best: BestConfig | None = None
    notes: tuple[str, ...] = ()
    subtitle: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    created: str = ""
    drawn: str = ""

    def ranked(self) -> tuple[TrialReport, ...]:
        """Return trials with a metric, the best first."""
        measured = [trial for trial in self.trials if trial.best is not None]
        sign = 1.0 if self.smaller_is_better else -1.0
        return tuple(sorted(measured, key=lambda trial: sign * (trial.best or 0.0)))


# Nested values by dotted name, and which of them a sweep varies.


def leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return every value that is not a mapping, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            found |= leaves(value, path)
        else:
            found[".".join(path)] = value
    return found


def swept_axes(hyperparameters: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Return one axis for each range in an experiment's hyperparameters."""
    found = []
    for path, entry in find_ranges(hyperparameters):
        name = ".".join(path)
        if entry["type"] == "categorical":
            found.append(Axis(name, choices=tuple(dict.fromkeys(format_value(value) for value in entry["vals"]))))
        else:
            found.append(Axis(name, log=entry["type"] == "log"))
    return tuple(found)


def differing_axes(points: Sequence[Mapping[str, Any]]) -> tuple[Axis, ...]:
    """Return one axis for each leaf that is not the same everywhere; few numbers, or anything else,
    are choices.
    """
    names = dict.fromkeys(name for point in points for name in point)
    found = []
    for name in names:
        values = [point.get(name) for point in points]
        if len({format_value(value) for value in values}) < 2:
            continue
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        if numbers and len({format_value(value) for value in values}) > 4:
            found.append(Axis(name))
        else:
            spelled = {format_value(value): value for value in values}
            order = sorted(spelled, key=lambda text: (_rank(spelled[text]), text))
            found.append(Axis(name, choices=tuple(order)))
    return tuple(found)


def _rank(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("inf")


def reach(values: Mapping[str, Any], name: str) -> Any:
    """Return the value at a dotted name; None if there is none."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def format_time(seconds: float) -> str:
    """Return a time to the minute in UTC."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"  # no year of the calendar


def as_yaml(experiment_yaml: Mapping[str, Any], comment: str) -> str:
    """Return the experiment as a file, under a line that says what it is.

    Floats are written so that every YAML reader takes them for numbers.
    """
    head = " ".join(comment.split())
    return f"# {head}\n" + write_yaml(experiment_yaml, width=100)
