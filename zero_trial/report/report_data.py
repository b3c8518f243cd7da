"""The data of pages, as frozen values: a run, a sweep with its trials and decisions, the board's
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
"""Points of a line in a drawing: one per pixel if the drawing is this wide."""


class Tone(str, Enum):
    """The look of a state: succeeded, in progress, ended intentionally, or failed."""

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
    """A named quantity over steps (same length): finite values at increasing steps.

    ``low`` and ``high``: bounds of the single values that each value averages; empty if there are
    none. ``last``: the last single value, if the last of ``values`` is a mean.
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

    ``parts`` of the plan by name; ``processes``: peak of each rank's process or device.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    planned: int | None = None
    measured: int | None = None
    processes: tuple[int, ...] = ()
    processes_kind: str = ""


@dataclass(frozen=True)
class Setting:
    """One ds_config value, its source, and a remark; ``given``: not a default."""

    key: str
    value: Any
    source: str
    remark: str
    given: bool


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint; ``kept`` if it still exists."""

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

    Series that were not recorded are empty; ``facts`` are name-value pairs in display order.
    ``config``: the experiment in the lock, or a trial's hyperparameters.
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
        """Return the completed steps, and the total if known."""
        done, _, total = dict(self.facts).get("steps", "").partition(" of ")
        return int(done) if done.isdigit() else 0, int(total) if total.isdigit() else None

    def point(self) -> dict[str, Any]:
        """Return the configuration's values by dotted name, for comparing runs."""
        found = leaves({name: self.config[name] for name in _SECTIONS if isinstance(self.config.get(name), Mapping)})
        return {name: value for name, value in found.items() if not name.startswith(_OF_THE_LOCK)}


_SECTIONS = ("hyperparameters", "data", "resources", "reproducibility", "searcher")
_OF_THE_LOCK = "data.zero_trial."


@dataclass(frozen=True)
class TrialReport:
    """One point of a sweep.

    ``point``: the swept values by dotted name. ``best``: the searcher's metric as reported.
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
    """A decision of the search about a trial."""

    WENT_ON = "went on"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True)
class RungDecision:
    """One decision of the search: its time (in units of training) and reason (a sentence)."""

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
    """The best trial as the text of best.yaml, which can be run as is."""

    trial: str
    metric: float
    text: str


@dataclass(frozen=True)
class SweepReport:
    """A search and all its trials.

    ``drawn``: the metric of the trials' curves, if not ``metric``. ``pruned``: reasons why points
    were never launched, with counts. ``notes``: warnings about the best trial, such as a learning
    rate that its scheduler overrides.
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
    metrics: tuple[tuple[str, str], ...] = ()  # group and name of all metrics that the curves can show

    def ranked(self) -> tuple[TrialReport, ...]:
        """Return trials with a metric, best first."""
        measured = [trial for trial in self.trials if trial.best is not None]
        sign = 1.0 if self.smaller_is_better else -1.0
        return tuple(sorted(measured, key=lambda trial: sign * (trial.best or 0.0)))


# The overview of the board.


@dataclass(frozen=True)
class OverviewRow:
    """One experiment, or one run of a folder.

    Args:
        done: the completed fraction of the training; None if unknown.
        best: the searcher's metric, as reported.
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
    """All rows; ``begin`` is a command to show if there are none."""

    title: str
    subtitle: str
    noun: str  # the word for a row: experiment or run
    rows: tuple[OverviewRow, ...]
    begin: str = ""


@dataclass(frozen=True)
class OutputLine:
    """A line of output, with its rank and time if known."""

    text: str
    rank: int | None = None
    time: float | None = None
    level: str = ""


# Curves: a quantity over steps, with mean, minimum and maximum per pixel of a drawing.


class Curve:
    """Collects values by step, each with the bounds of the single steps that it averages.

    Values can arrive in any order; the later of two values at one step wins. Skips values that are
    not finite.
    """

    def __init__(self, steps: Iterable[float] = (), values: Iterable[float] = ()) -> None:
        """Start with ``steps`` and ``values``, all finite."""
        self._steps, self._values = array("d", steps), array("d", values)
        self._low, self._high = array("d", self._values), array("d", self._values)
        self._in_order, self._bounded = False, False

    def __len__(self) -> int:
        self._sort()
        return len(self._steps)

    def add(self, step: Any, value: Any, single: Sequence[float] = ()) -> None:
        """Add a value, which is the mean of ``single`` if that has several values."""
        if is_finite(step) and is_finite(value):
            single = single if len(single) > 1 else ()
            self._in_order, self._bounded = False, self._bounded or bool(single)
            self._steps.append(step)
            self._values.append(value)
            self._low.append(min((*single, value)))
            self._high.append(max((*single, value)))

    def _sort(self) -> None:
        """Sort the values by step. Called before a read, not for each value: a file in reverse
        order would take quadratic time."""
        if not self._in_order and any(step >= after for step, after in pairwise(self._steps)):
            last = {step: at for at, step in enumerate(self._steps)}
            order = [last[step] for step in sorted(last)]
            for column in (self._steps, self._values, self._low, self._high):
                column[:] = array("d", [column[at] for at in order])
        self._in_order = True

    def rewind(self, step: float) -> None:
        """Remove values after ``step``, from which a run restarts."""
        self._sort()
        end = bisect_right(self._steps, step)
        for column in (self._steps, self._values, self._low, self._high):
            del column[end:]

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return step and value of the first and last point; the curve must not be empty."""
        self._sort()
        return (self._steps[0], self._values[0]), (self._steps[-1], self._values[-1])

    def best(self, smaller: bool) -> float | None:
        """Return the lowest or highest value; None if the curve is empty."""
        self._sort()  # drops the earlier of two values at one step
        return (min if smaller else max)(self._values, default=None)

    def series(self, name: str, most: int = MOST_POINTS) -> Series:
        """Return the points to draw: every value, or if too many, mean and bounds per pixel."""
        self._sort()
        every = Series(name, self._steps, self._values, *((self._low, self._high) if self._bounded else ()))
        if len(every) > most:
            return thinned(every, most)
        columns = tuple(self._steps), tuple(self._values), tuple(every.low), tuple(every.high)
        return Series(name, *columns)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most ``most`` points, each with mean, minimum and maximum of a pixel."""
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
    """Return the maximum number of points per line for a chart of ``lines`` lines."""
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
    """Return one axis per leaf that differs; few numbers, and all other types, become choices."""
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
        return "at an unknown time"  # outside the calendar


BEST_FILE = "best.yaml"
BEST_COMMAND = f"zero-trial run {BEST_FILE} MODEL_DIR"


def as_yaml(experiment_yaml: Mapping[str, Any], what: str) -> str:
    """Return the experiment as YAML text, after a comment with its purpose and run command.

    Writes floats so that every YAML reader reads them as numbers.
    """
    head = " ".join(f"{what}: {BEST_COMMAND}".split())
    return f"# {head}\n" + write_yaml(experiment_yaml, width=100)
