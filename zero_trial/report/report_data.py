"""What pages show, as frozen values: one run, a sweep with its trials and decisions, the board's
overview; and the curves that readers collect and charts draw."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from itertools import pairwise
from typing import Any

from zero_trial.experiment.space import find_ranges
from zero_trial.schema.config_source import write_yaml
from zero_trial.trial.runs.events import is_finite
from zero_trial.util.text import format_value

MOST_POINTS = 600
"""Points of a line in a drawing: a pixel each where the drawing is as wide."""


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
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
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
    processes: tuple[int, ...] = ()
    processes_kind: str = ""


@dataclass(frozen=True)
class Setting:
    """One ds_config value, its source, and a remark; ``given``: it was written or filled in."""

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
    """A validation metric before and after, with baselines. ``best``: searcher's metric only."""

    name: str
    before: float | None
    after: float
    baselines: tuple[tuple[str, float], ...] = ()
    best: float | None = None


@dataclass(frozen=True)
class RunReport:
    """One run, or one trial of an experiment.

    Series that were not recorded are empty; ``facts`` are name and value in the order to show them.
    ``config`` is the experiment in the lock, or of a trial its hyperparameters.
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
    config: Mapping[str, Any] = field(default_factory=dict)
    began: float | None = None  # seconds since the epoch
    experiment: str = ""  # the id of a trial's experiment

    @property
    def steps(self) -> tuple[int, int | None]:
        """Return the steps that are done, and of how many, if that is known."""
        done, _, total = dict(self.facts).get("steps", "").partition(" of ")
        return int(done) if done.isdigit() else 0, int(total) if total.isdigit() else None

    def point(self) -> dict[str, Any]:
        """Return the values of the configuration by dotted name, by which two runs can differ."""
        found = leaves({name: self.config[name] for name in _SECTIONS if isinstance(self.config.get(name), Mapping)})
        return {name: value for name, value in found.items() if not name.startswith(_OF_THE_LOCK)}


_SECTIONS = ("hyperparameters", "data", "resources", "reproducibility", "searcher")
_OF_THE_LOCK = "data.zero_trial."


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
    """One bracket: each rung's amount of training, and its decisions in order."""

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
    """The winner as the text of best.yaml, which runs by itself."""

    trial: str
    metric: float
    text: str


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
    metrics: tuple[tuple[str, str], ...] = ()  # group and name of all that the curves can be of

    def ranked(self) -> tuple[TrialReport, ...]:
        """Return trials with a metric, the best first."""
        measured = [trial for trial in self.trials if trial.best is not None]
        sign = 1.0 if self.smaller_is_better else -1.0
        return tuple(sorted(measured, key=lambda trial: sign * (trial.best or 0.0)))


# The overview of the board.


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
    """All there is; ``begin`` is a command for the case that there is nothing."""

    title: str
    subtitle: str
    noun: str  # what a row is: experiment or run
    rows: tuple[OverviewRow, ...]
    begin: str = ""


@dataclass(frozen=True)
class OutputLine:
    """A line of output, with its rank and time where they are known."""

    text: str
    rank: int | None = None
    time: float | None = None
    level: str = ""


# Curves: a quantity over steps, and its mean, lowest and highest value in each pixel of a drawing.


class Curve:
    """Collects values by step, each with the bounds of the single steps that it is the mean of.

    Values come in any order; of two at one step the later one counts. What is not a finite number
    is left out.
    """

    def __init__(self, steps: Iterable[float] = (), values: Iterable[float] = ()) -> None:
        """``steps`` and ``values``, all finite, are the first ones."""
        self._steps, self._values = array("d", steps), array("d", values)
        self._low, self._high = array("d", self._values), array("d", self._values)
        self._in_order, self._bounded = False, False

    def __len__(self) -> int:
        self._sort()
        return len(self._steps)

    def add(self, step: Any, value: Any, single: Sequence[float] = ()) -> None:
        """Add a value, the mean of ``single`` ones if those are several."""
        if is_finite(step) and is_finite(value):
            single = single if len(single) > 1 else ()
            self._in_order, self._bounded = False, self._bounded or bool(single)
            self._steps.append(step)
            self._values.append(value)
            self._low.append(min((*single, value)))
            self._high.append(max((*single, value)))

    def _sort(self) -> None:
        """Bring the values into the order of their steps. It is done before a read and not at each
        value: a file in reverse order would take quadratic time."""
        if not self._in_order and any(step >= after for step, after in pairwise(self._steps)):
            last = {step: at for at, step in enumerate(self._steps)}
            order = [last[step] for step in sorted(last)]
            for column in (self._steps, self._values, self._low, self._high):
                column[:] = array("d", [column[at] for at in order])
        self._in_order = True

    def rewind(self, step: float) -> None:
        """Remove what is beyond ``step``: a run that starts there again takes it back."""
        self._sort()
        end = bisect_right(self._steps, step)
        for column in (self._steps, self._values, self._low, self._high):
            del column[end:]

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return step and value of the first and of the last; there must be one."""
        self._sort()
        return (self._steps[0], self._values[0]), (self._steps[-1], self._values[-1])

    def best(self, smaller: bool) -> float | None:
        """Return the lowest or the highest value; None if there is none."""
        self._sort()  # of two at one step the later counts
        return (min if smaller else max)(self._values, default=None)

    def series(self, name: str, most: int = MOST_POINTS) -> Series:
        """Return what is drawn: every value, or of many the mean and the bounds in each pixel."""
        self._sort()
        every = Series(name, self._steps, self._values, *((self._low, self._high) if self._bounded else ()))
        if len(every) > most:
            return thinned(every, most)
        columns = tuple(self._steps), tuple(self._values), tuple(every.low), tuple(every.high)
        return Series(name, *columns)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most ``most`` points, each the mean, the lowest and the highest of a pixel."""
    if len(series) <= most:
        return series
    steps, values = series.steps, series.values
    low, high = series.low or values, series.high or values
    first = steps[0]
    width = (steps[-1] - first) / most
    found: list[tuple[float, float, float, float]] = []
    start = 0
    while start < len(steps):
        pixel = min(int((steps[start] - first) / width), most - 1)
        end = len(steps) if pixel == most - 1 else bisect_left(steps, first + (pixel + 1) * width, start + 1)
        span, count = slice(start, end), end - start
        found.append((sum(steps[span]) / count, sum(values[span]) / count, min(low[span]), max(high[span])))
        start = end
    at, means, lows, highs = zip(*found, strict=True)
    return Series(series.name, at, means, lows, highs, values[-1] if series.last is None else series.last)


def most_of_each(lines: int) -> int:
    """Return the points of each line where ``lines`` are drawn over each other."""
    return min(MOST_POINTS, max(120, 24_000 // max(lines, 1)))


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
    """Return one axis per leaf that differs; few numbers, or anything else, are choices."""
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


BEST_FILE = "best.yaml"
BEST_COMMAND = f"zero-trial run {BEST_FILE} MODEL_DIR"


def as_yaml(experiment_yaml: Mapping[str, Any], what: str) -> str:
    """Return the experiment as a file, under a line that says what it is and how it runs.

    Floats are written so that every YAML reader takes them for numbers.
    """
    head = " ".join(f"{what}: {BEST_COMMAND}".split())
    return f"# {head}\n" + write_yaml(experiment_yaml, width=100)
