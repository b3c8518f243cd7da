"""A search as a state machine: it receives events about trials and returns actions. Between events,
its whole state is a JSON value.

First comes the random stream, from which each trial gets its hyperparameters, request id and seed:
`Stream` draws the same values as a Determined 0.38.1 master with the same seed. Then come the
common base class and the searchers single, random, grid and adaptive_asha.

adaptive_asha runs several brackets of asynchronous successive halving (ASHA) in parallel, as in
Determined 0.38. `divide` splits the trials into brackets. A `Bracket` is a ladder of rungs; at each
rung, only the best 1/divisor of the trials measured there may continue.

To add a searcher, subclass `Searcher`, add it to SEARCHERS, and add its keys to
``experiment/sections.py``.
"""

from __future__ import annotations

import abc
import bisect
import math
import random
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.experiment.space import Grid, sample
from zero_trial.master.records import as_number

_SEEDS = 2**31  # of trials: 0 to 2^31 - 1


class Stream:
    """One Mersenne Twister for all trials of a search, as in Determined.

    Each trial draws its hyperparameters, then the 16 bytes of its request id, then its seed.
    numpy's ``RandomState(seed)`` uses the same seeding and produces the same integers and doubles.

    The state is the seed and the number of 32-bit words drawn so far. Restoring a search draws
    these words again: 64 KB for each 16 384 words.
    """

    def __init__(self, seed: int, words: int = 0) -> None:
        key = [seed % 2**32]
        for number in range(1, 624):
            key.append((1812433253 * (key[-1] ^ key[-1] >> 30) + number) % 2**32)
        self._twister = random.Random()
        self._twister.setstate((3, (*key, 624), None))
        if words:
            self._twister.getrandbits(32 * words)
        self._seed, self._words = seed, words

    def trial(
        self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None
    ) -> tuple[str, Mapping[str, Any], int]:
        """Draw the next trial: a sample of ``space``, unless ``hparams`` are given. Return its
        request id, hyperparameters and seed."""
        drawn = sample(space, self) if hparams is None else hparams
        name = b"".join(self._word().to_bytes(4, "little") for _ in range(4))
        return str(uuid.UUID(bytes=name, version=4)), drawn, self.below(_SEEDS)

    def as_json(self) -> dict[str, Any]:
        return {"seed": self._seed, "words": self._words}

    def below(self, count: int) -> int:
        """Return an integer from 0 to count - 1: the lowest bits of a draw, repeated while the
        result is too large. A count of 1 draws nothing."""
        bits = (count - 1).bit_length()
        while bits:
            drawn = self._word() if bits <= 32 else self._word() << 32 | self._word()
            drawn %= 1 << bits
            if drawn < count:
                return drawn
        return 0

    def unit(self) -> float:
        """Return a float in [0, 1), made of 27 bits of one word and 26 bits of the next."""
        return ((self._word() >> 5) * 2.0**26 + (self._word() >> 6)) / 2.0**53

    def _word(self) -> int:
        self._words += 1
        return self._twister.getrandbits(32)


class ExitReason(str, Enum):
    """The reason for the end of a trial, as reported to its searcher.

    A trial whose hyperparameters cannot be trained is COMPLETED, because Determined's master
    does not report such trials to the searcher either: the trial counts, and is not replaced.
    """

    COMPLETED = "completed"  # it trained to its end, or the searcher stopped it
    ERRORED = "errored"  # it failed and has no restarts left
    CANCELED = "canceled"  # its user canceled it


@dataclass(frozen=True)
class Create:
    """Start a trial with this seed; all later events use its ``request_id``."""

    request_id: str
    hparams: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Stop:
    """End a trial permanently, as COMPLETED. ``finished``: it has trained to its full length."""

    request_id: str
    finished: bool = False


@dataclass(frozen=True)
class Shutdown:
    """The search is over; the final states of its trials determine the experiment's final state."""


Action: TypeAlias = Create | Stop | Shutdown


@dataclass(frozen=True)
class PlannedTrials:
    """``count`` trials that train for ``units`` of ``unit``; None: the full length."""

    count: int
    units: int | None = None
    unit: str = ""


class MetricMissing(ZeroTrialError):
    """A validation lacks the searcher's metric; the state of the searcher is unchanged."""


_RUNNING, _STOPPING = "running", "stopping"


class Searcher(abc.ABC):
    """Decides one experiment's search. Not thread-safe.

    Pure: uses no clock and no files; the same events produce the same actions. Events about ended
    trials, and all events after Shutdown, have no effect. Unknown ids raise ZeroTrialError.

    Attributes:
        section: the completed config's ``searcher``, without nulls.
        space: its ``hyperparameters``.
        states: maps request ids, in order of creation, to ``running``, ``stopping`` or the value of
            an ExitReason.
    """

    kind: ClassVar[str]

    def __init__(self, section: Mapping[str, Any], space: Mapping[str, Any], draws: Stream) -> None:
        self.section = {name: value for name, value in section.items() if value is not None}
        self.space = space
        self.draws = draws
        self.states: dict[str, str] = {}
        self.over = False

    def start(self) -> list[Action]:
        """Return the first actions. Called once, before any event."""
        return self._ended_if_empty(self._first())

    def on_validation(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        """Handle the validation ``metrics`` of a trial.

        Raises MetricMissing if the search cannot continue with this trial. The caller then fails
        the trial and calls ``on_exited(request_id, ExitReason.ERRORED)`` after its end.
        """
        if self.over or self._state(request_id) != _RUNNING:
            return []
        return self._validated(request_id, metrics)

    def on_exited(self, request_id: str, reason: ExitReason) -> list[Action]:
        """Handle the end of a trial. Called once per trial, also after a Stop (COMPLETED)."""
        before = "" if self.over else self._state(request_id)
        if before not in (_RUNNING, _STOPPING):
            return []
        self.states[request_id] = reason.value
        return self._ended_if_empty(self._exited(request_id, reason, before == _STOPPING))

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return the progress of the search, 0 to 1, as Determined computes it. The value can
        decrease when trials are created.

        Args:
            fractions: the progress of each running trial, 0 to 1, by request id.
        """
        return 1.0 if self.over else min(max(self._progress(fractions), 0.0), 1.0)

    @abc.abstractmethod
    def preview(self) -> list[PlannedTrials]:
        """Return the expected number of trials per training length, shortest first."""

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state, including the draws, as a JSON value for ``restore``."""
        return {"kind": self.kind, "draws": self.draws.as_json(), "trials": dict(self.states), "over": self.over}

    def load_state(self, snapshot: Mapping[str, Any]) -> None:
        """Load the state of ``snapshot``, except the draws, which were set when this searcher was
        built. Raises ZeroTrialError if the snapshot belongs to another kind of searcher."""
        if snapshot.get("kind") != self.kind:
            raise ZeroTrialError(
                "the snapshot belongs to another searcher", got=snapshot.get("kind"), expected=self.kind
            )
        self.states = dict(snapshot["trials"])
        self.over = snapshot["over"]

    @abc.abstractmethod
    def _first(self) -> list[Action]: ...

    @abc.abstractmethod
    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]: ...

    @abc.abstractmethod
    def _progress(self, fractions: Mapping[str, float]) -> float: ...

    def _validated(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        return []

    def _create(self, hparams: Mapping[str, Any] | None = None) -> Create:
        """Create a trial from a new sample, unless ``hparams`` are given."""
        request_id, drawn, seed = self.draws.trial(self.space, hparams)
        self.states[request_id] = _RUNNING
        return Create(request_id, drawn, seed)

    def _state(self, request_id: str) -> str:
        try:
            return self.states[request_id]
        except KeyError:
            raise ZeroTrialError("not a trial of this search", where=f"request id {request_id}") from None

    def _ended_if_empty(self, actions: list[Action]) -> list[Action]:
        """Return ``actions``, plus a Shutdown if no trial is left."""
        if any(state in (_RUNNING, _STOPPING) for state in self.states.values()):
            return actions
        self.over = True
        return [*actions, Shutdown()]


class RandomSearch(Searcher):
    """Runs ``max_trials`` random samples, at most ``max_concurrent_trials`` at a time (0: all)."""

    kind = "random"

    def __init__(self, section: Mapping[str, Any], space: Mapping[str, Any], draws: Stream) -> None:
        super().__init__(section, space, draws)
        self.size = self._size()

    def _size(self) -> int:
        return int(self.section["max_trials"])

    def preview(self) -> list[PlannedTrials]:
        return [PlannedTrials(self.size)]

    def _first(self) -> list[Action]:
        at_a_time = int(self.section.get("max_concurrent_trials", 16)) or self.size  # 0 means all
        return [self._next() for _ in range(min(self.size, at_a_time))]

    def _next(self) -> Create:
        return self._create()

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        return [self._next()] if len(self.states) < self.size else []

    def _progress(self, fractions: Mapping[str, float]) -> float:
        """Return the average progress of the trials created so far; ended trials count as 1."""
        shares = [
            min(max(fractions.get(request_id, 0.0), 0.0), 1.0) if state in (_RUNNING, _STOPPING) else 1.0
            for request_id, state in self.states.items()
        ]
        return sum(shares) / max(len(shares), 1)


class SingleSearch(RandomSearch):
    """Runs one trial."""

    kind = "single"

    def _size(self) -> int:
        return 1


class GridSearch(RandomSearch):
    """Runs every point of the grid once, from the last to the first."""

    kind = "grid"

    def _size(self) -> int:
        self._grid = Grid.of(self.space)
        return self._grid.size

    def _next(self) -> Create:
        return self._create(self._grid.point(self.size - len(self.states) - 1))


def divide(section: Mapping[str, Any], max_time: int) -> list[tuple[int, int, int]]:
    """Return (rungs, trials, concurrent trials) of each bracket. ``section`` is without nulls. The
    bracket with the most rungs, that is, with the most early stopping, is first. Pure."""
    max_trials, divisor = section["max_trials"], float(section.get("divisor", 4))
    rungs = section.get("bracket_rungs")
    if not rungs:
        # limit the number of rungs to what max_time and max_trials allow
        by_time, by_trials = (int(math.log(number) / math.log(divisor)) + 1 for number in (max_time, max_trials))
        most = min(section.get("max_rungs", 5), by_time, by_trials)
        rungs = rungs_by_mode(section.get("mode", "standard"), most)
    rungs = sorted(rungs, reverse=True)
    trials = _trials(max_trials, divisor, rungs)
    return list(
        zip(rungs, trials, _concurrent(int(section.get("max_concurrent_trials", 16)), divisor, trials), strict=True)
    )


def rungs_by_mode(mode: str, most: int) -> list[int]:
    """Return the number of rungs of each bracket.

    Aggressive: one bracket with all rungs. Conservative: one bracket of each height. Standard: the
    upper half of the conservative brackets.
    """
    lowest = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}.get(mode)
    if lowest is None:
        raise ConfigError(
            "no such mode", where="searcher.mode", got=mode, expected="aggressive, standard, conservative"
        )
    return list(range(lowest, most + 1))


def _trials(max_trials: int, divisor: float, rungs: Sequence[int]) -> list[int]:
    """Divide the trials such that all brackets cost about the same.

    A bracket of r rungs spends about r / divisor^(r-1) of a full training per trial.
    """
    weights = [divisor ** (number - 1) / number for number in rungs]
    total = sum(weights)
    shares = [max(int(weight / total * max_trials), 1) for weight in weights]
    shares[0] += max(max_trials - sum(shares), 0)
    return shares


def _concurrent(max_concurrent: int, divisor: float, trials: Sequence[int]) -> list[int]:
    number = len(trials)
    if max_concurrent == 0:
        return [max(trials[-1], int(divisor))] * number
    each, left = divmod(max(max_concurrent, number), number)
    return [each + (1 if index < left else 0) for index in range(number)]


WORST = sys.float_info.max
"""The metric of a trial that ended early: it ranks after every trial that reported one."""


@dataclass
class Rung:
    """A rung with its measured trials.

    ``units`` is how long a trial must train to be measured here. ``entries`` are (metric, request
    id) pairs, smallest metric first.
    """

    units: int
    entries: list[tuple[float, str]] = field(default_factory=list)

    def insert(self, metric: float, request_id: str) -> int:
        """Insert a metric in sorted order, before equal values; return its rank (from 0)."""
        rank = bisect.bisect_left([entry[0] for entry in self.entries], metric)
        self.entries.insert(rank, (metric, request_id))
        return rank


@dataclass
class Bracket:
    """A ladder of rungs; the top rung is the full training.

    ``position`` is the rung that each of its trials must pass next.
    """

    rungs: list[Rung]
    divisor: float
    max_trials: int
    max_concurrent: int
    position: dict[str, int] = field(default_factory=dict)
    ended: int = 0

    @classmethod
    def ladder(cls, rungs: int, divisor: float, max_time: int, max_trials: int, max_concurrent: int) -> Bracket:
        """Create the rungs: the rung k below the top needs max_time / divisor^k units, at least 1.

        See Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", Alg. 2; the
        reduction factor there is called divisor here.
        """
        units = [max(int(max_time / divisor ** (rungs - 1 - number)), 1) for number in range(rungs)]
        return cls([Rung(need) for need in units], divisor, max_trials, max_concurrent)

    def planned(self) -> list[tuple[int, int]]:
        """Return each rung's units and how many trials end there if 1/divisor of them continue."""
        found, reached = [], self.max_trials
        for rung in self.rungs[:-1]:
            on = max(int(reached / self.divisor), 1)
            found.append((rung.units, reached - on))
            reached = on
        return [*found, (self.rungs[-1].units, reached)]

    def first_trials(self) -> int:
        return min(self.max_concurrent, self.max_trials)

    def climb(self, request_id: str, time: int, metric: float) -> bool:
        """Record a validation at one or more rungs; return whether the trial must stop."""
        for number in range(self.position[request_id], len(self.rungs)):
            rung = self.rungs[number]
            self.position[request_id] = number
            if time < rung.units:
                return False
            rank = rung.insert(metric, request_id)
            top = number == len(self.rungs) - 1
            if top or rank >= max(int(len(rung.entries) / self.divisor), 1):
                return True
        return False

    def drop_early(self, request_id: str) -> None:
        """Permanently rank a trial that ended early last in its rung."""
        self.rungs[self.position[request_id]].insert(WORST, request_id)

    def progress(self) -> float:
        """Return measured / (1.2 max_trials); if all are measured, at least ended / max_trials."""
        measured = len(self.rungs[0].entries)
        done = measured / (1.2 * self.max_trials)
        return max(self.ended / self.max_trials, done) if measured == self.max_trials else done

    def as_json(self) -> dict[str, Any]:
        return {
            "rungs": [[list(entry) for entry in rung.entries] for rung in self.rungs],
            "position": dict(self.position),
            "ended": self.ended,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for rung, entries in zip(self.rungs, state["rungs"], strict=True):
            rung.entries = [(float(metric), request_id) for metric, request_id in entries]
        self.position = dict(state["position"])
        self.ended = state["ended"]


class AdaptiveAsha(Searcher):
    """Asynchronous successive halving with several brackets.

    A trial runs until its validation is not one of the best 1/divisor of its rung, or until it
    reaches the top rung. It belongs to the bracket that created it. Both ``metric`` and
    ``time_metric`` are read from the validation metrics. NaN counts as the worst value.
    """

    kind = "adaptive_asha"

    def __init__(self, section: Mapping[str, Any], space: Mapping[str, Any], draws: Stream) -> None:
        super().__init__(section, space, draws)
        self.metric = section["metric"]
        self.time_metric, max_time = training_length(section)
        self.sign = 1.0 if self.section.get("smaller_is_better", True) else -1.0
        self.brackets = [
            Bracket.ladder(rungs, float(self.section.get("divisor", 4)), max_time, trials, at_a_time)
            for rungs, trials, at_a_time in divide(self.section, max_time)
        ]

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "brackets": [bracket.as_json() for bracket in self.brackets]}

    def load_state(self, snapshot: Mapping[str, Any]) -> None:
        super().load_state(snapshot)
        for bracket, state in zip(self.brackets, snapshot["brackets"], strict=True):
            bracket.restore(state)

    def bracket_of(self, request_id: str) -> Bracket:
        """Return the bracket that created a trial."""
        return next(bracket for bracket in self.brackets if request_id in bracket.position)

    def preview(self) -> list[PlannedTrials]:
        trials: Counter[int] = Counter()
        for bracket in self.brackets:
            for units, ended in bracket.planned():
                trials[units] += ended
        return [PlannedTrials(trials[units], units, self.time_metric) for units in sorted(trials)]

    def _first(self) -> list[Action]:
        return [self._enter(bracket) for bracket in self.brackets for _ in range(bracket.first_trials())]

    def _enter(self, bracket: Bracket) -> Action:
        created = self._create()
        bracket.position[created.request_id] = 0
        return created

    def _enter_if_below(self, bracket: Bracket) -> list[Action]:
        return [self._enter(bracket)] if len(bracket.position) < bracket.max_trials else []

    def _validated(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        time = _number(metrics, self.time_metric, "searcher.time_metric")
        value = _number(metrics, self.metric, "searcher.metric")
        if not math.isfinite(time):
            raise _missing(self.time_metric, "searcher.time_metric", time)
        bracket = self.bracket_of(request_id)
        metric = WORST if math.isnan(value) else min(max(self.sign * value, -WORST), WORST)
        if not bracket.climb(request_id, int(time), metric):
            return []
        finished = bracket.position[request_id] == len(bracket.rungs) - 1
        self.states[request_id] = _STOPPING
        return [Stop(request_id, finished), *self._enter_if_below(bracket)]

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        bracket = self.bracket_of(request_id)
        bracket.ended += 1
        if reason is ExitReason.COMPLETED or was_stopping:
            return []
        bracket.drop_early(request_id)
        return self._enter_if_below(bracket)

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return sum(bracket.progress() for bracket in self.brackets) / len(self.brackets)


def training_length(searcher: Mapping[str, Any]) -> tuple[str, int]:
    """Return the time metric and the training length: max_time, or max_length."""
    length = searcher.get("max_length")
    if searcher.get("max_time") is not None:
        return str(searcher["time_metric"]), int(searcher["max_time"])
    if isinstance(length, Mapping) and len(length) == 1:
        ((unit, count),) = length.items()
        return str(unit), int(count)
    raise ConfigError(
        "the training length is missing", where="searcher.max_time", fix="Write max_time and time_metric."
    )


def _number(metrics: Mapping[str, Any], name: str, where: str) -> float:
    value = metrics.get(name)
    number = as_number(value)
    if number is None:
        raise _missing(name, where, value, metrics)
    return number


def _missing(name: str, where: str, value: Any, metrics: Mapping[str, Any] | None = None) -> MetricMissing:
    there = ", ".join(sorted(metrics)) if metrics else "no metrics"
    got = f"{there} in the validation metrics" if value is None else repr(value)
    return MetricMissing(f'the validation metrics contain no number named "{name}"', where=where, got=got)


SEARCHERS: Mapping[str, type[Searcher]] = MappingProxyType(
    {kind.kind: kind for kind in (SingleSearch, RandomSearch, GridSearch, AdaptiveAsha)}
)
"""The searchers by ``searcher.name``."""


def build(section: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int, words: int = 0) -> Searcher:
    """Build the searcher of a completed config, not yet started. Raises ConfigError for values that
    ``experiment.complete`` would have rejected.

    Args:
        section: the config's ``searcher``.
        hyperparameters: the space to search.
        seed: ``reproducibility.experiment_seed``.
        words: number of random words already drawn.
    """
    kind = SEARCHERS.get(str(section.get("name")))
    if kind is None:
        raise ConfigError(
            "no such searcher", where="searcher.name", got=section.get("name"), expected=", ".join(SEARCHERS)
        )
    return kind(section, hyperparameters, Stream(seed, words))


def restore(section: Mapping[str, Any], hyperparameters: Mapping[str, Any], snapshot: Mapping[str, Any]) -> Searcher:
    """Build the searcher of a config and restore its state from ``snapshot``."""
    search = build(section, hyperparameters, int(snapshot["draws"]["seed"]), int(snapshot["draws"]["words"]))
    search.load_state(snapshot)
    return search
