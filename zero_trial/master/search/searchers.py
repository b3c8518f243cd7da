"""The searchers adaptive_asha, random, single and grid, and the table from which an experiment's
searcher is built.

adaptive_asha is brackets of asynchronous successive halving (ASHA) side by side, as in Determined
0.38: `divide` cuts the trials into brackets; a `Bracket` is a ladder of rungs, at each of which
only the best 1/divisor of the trials that were measured there may go on.

A new searcher is a subclass of `Searcher` with a row in SEARCHERS, and its keys in
``experiment/sections.py``.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.experiment.space import Grid
from zero_trial.master.records import as_number
from zero_trial.master.search.searcher import (
    Action,
    Draws,
    ExitReason,
    MetricMissing,
    PlannedTrials,
    Searcher,
    Stream,
    max_concurrent,
    option,
    restored,
)


@dataclass(frozen=True)
class Budget:
    """The keys of ``searcher`` that determine the brackets."""

    max_trials: int
    max_time: int
    mode: str = "standard"
    divisor: float = 4.0
    max_rungs: int = 5
    max_concurrent_trials: int = 16
    bracket_rungs: tuple[int, ...] = ()


@dataclass(frozen=True)
class BracketShare:
    """The share of one bracket: its rungs, its trials, and how many of them run at a time."""

    rungs: int
    max_trials: int
    max_concurrent: int


def divide(budget: Budget) -> tuple[BracketShare, ...]:
    """Return the brackets, those with most rungs, that is with most early stopping, first. Pure."""
    rungs = sorted(budget.bracket_rungs or rungs_by_mode(budget.mode, _most_rungs(budget)), reverse=True)
    trials = _trials(budget.max_trials, budget.divisor, rungs)
    concurrent = _concurrent(budget.max_concurrent_trials, budget.divisor, trials)
    return tuple(BracketShare(*part) for part in zip(rungs, trials, concurrent, strict=True))


def rungs_by_mode(mode: str, most: int) -> list[int]:
    """Return the rungs of each bracket.

    Aggressive: one bracket with all rungs. Conservative: one of each height. Standard: the upper
    half of those.
    """
    lowest = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}.get(mode)
    if lowest is None:
        raise ConfigError(
            "no such mode", where="searcher.mode", got=mode, expected="aggressive, standard, conservative"
        )
    return list(range(lowest, most + 1))


def _most_rungs(budget: Budget) -> int:
    """Return the most rungs that max_time and max_trials have room for."""
    by_time, by_trials = (
        int(math.log(number) / math.log(budget.divisor)) + 1 for number in (budget.max_time, budget.max_trials)
    )
    return min(budget.max_rungs, by_time, by_trials)


def _trials(max_trials: int, divisor: float, rungs: Sequence[int]) -> list[int]:
    """Divide the trials so that all brackets cost about as much.

    A bracket of r rungs spends about r / divisor^(r-1) of a whole training per trial.
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
"""The metric of a trial that ended early: behind every trial that reported one."""


@dataclass
class Rung:
    """A rung with its measured trials.

    ``units`` is the training that a trial needs to be measured here; ``entries`` are (metric,
    request id), smallest metric first.
    """

    units: int
    entries: list[tuple[float, str]] = field(default_factory=list)

    def insert(self, metric: float, request_id: str) -> int:
        """Put a metric in its place, before equal ones, and return its rank from 0."""
        rank = bisect.bisect_left([entry[0] for entry in self.entries], metric)
        self.entries.insert(rank, (metric, request_id))
        return rank


@dataclass
class Bracket:
    """A ladder of rungs whose top is the whole training.

    ``position`` is the rung that each of its trials has to pass next.
    """

    rungs: list[Rung]
    divisor: float
    max_trials: int
    max_concurrent: int
    position: dict[str, int] = field(default_factory=dict)
    ended: int = 0

    @classmethod
    def ladder(cls, rungs: int, divisor: float, max_time: int, max_trials: int, max_concurrent: int) -> Bracket:
        """Make the rungs: rung k below the top needs max_time / divisor^k units, at least 1.

        Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", Alg. 2, with the
        reduction factor called divisor.
        """
        units = [max(int(max_time / divisor ** (rungs - 1 - number)), 1) for number in range(rungs)]
        return cls([Rung(need) for need in units], divisor, max_trials, max_concurrent)

    def planned(self) -> list[tuple[int, int]]:
        """Return the units of each rung and how many trials end there, if 1/divisor of those that
        reach it go on.
        """
        found, reached = [], self.max_trials
        for rung in self.rungs[:-1]:
            on = max(int(reached / self.divisor), 1)
            found.append((rung.units, reached - on))
            reached = on
        return [*found, (self.rungs[-1].units, reached)]

    def first_trials(self) -> int:
        return min(self.max_concurrent, self.max_trials)

    def climb(self, request_id: str, time: int, metric: float) -> bool:
        """Record a validation at one rung or several; return whether the trial must stop."""
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
        """Rank a trial that ended by itself last in its rung for good."""
        self.rungs[self.position[request_id]].insert(WORST, request_id)

    def progress(self) -> float:
        """Return measured trials over 1.2 max_trials, since the last ones need time too; at the
        end, trials over max_trials.
        """
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

    A trial runs until its validation is not among the best 1/divisor of its rung, or has reached
    the top. It belongs to the bracket that created it. ``metric`` and ``time_metric`` are both read
    from the validation metrics. NaN counts as the worst value.
    """

    kind = "adaptive_asha"

    def __init__(
        self,
        space: Mapping[str, Any],
        draws: Draws,
        budget: Budget,
        *,
        metric: str,
        time_metric: str,
        smaller_is_better: bool,
    ) -> None:
        super().__init__(space, draws)
        self.metric = metric
        self.time_metric = time_metric
        self.sign = 1.0 if smaller_is_better else -1.0
        self.brackets = [
            Bracket.ladder(share.rungs, budget.divisor, budget.max_time, share.max_trials, share.max_concurrent)
            for share in divide(budget)
        ]

    @classmethod
    def of(cls, section: Mapping[str, Any], space: Mapping[str, Any], draws: Draws) -> Searcher:
        time_metric, max_time = training_length(section)
        budget = Budget(
            max_trials=section["max_trials"],
            max_time=max_time,
            mode=option(section, "mode", "standard"),
            divisor=float(option(section, "divisor", 4)),
            max_rungs=option(section, "max_rungs", 5),
            max_concurrent_trials=max_concurrent(section),
            bracket_rungs=tuple(section.get("bracket_rungs") or ()),
        )
        return AdaptiveAsha(
            space,
            draws,
            budget,
            metric=section["metric"],
            time_metric=time_metric,
            smaller_is_better=option(section, "smaller_is_better", True),
        )

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
        return [self._stop(request_id, finished=finished), *self._enter_if_below(bracket)]

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        bracket = self.bracket_of(request_id)
        bracket.ended += 1
        if reason is ExitReason.COMPLETED or was_stopping:
            return []
        bracket.drop_early(request_id)
        return self._enter_if_below(bracket)

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return sum(bracket.progress() for bracket in self.brackets) / len(self.brackets)

    def _own_state(self) -> dict[str, Any]:
        return {"brackets": [bracket.as_json() for bracket in self.brackets]}

    def _restore_own(self, snapshot: Mapping[str, Any]) -> None:
        for bracket, state in zip(self.brackets, snapshot["brackets"], strict=True):
            bracket.restore(state)


def training_length(searcher: Mapping[str, Any]) -> tuple[str, int]:
    """Return the time metric and the length of a training: max_time, or max_length."""
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
    return MetricMissing(f'the validation has no number "{name}"', where=where, got=got)


class _RandomSearch(Searcher):
    """``max_trials`` samples, some at a time (0: all)."""

    kind = "random"

    def __init__(self, space: Mapping[str, Any], draws: Draws, max_trials: int, max_concurrent: int) -> None:
        super().__init__(space, draws)
        self.max_trials = max_trials
        self.max_concurrent = max_concurrent or max_trials

    @classmethod
    def of(cls, section: Mapping[str, Any], space: Mapping[str, Any], draws: Draws) -> Searcher:
        return _RandomSearch(space, draws, section["max_trials"], max_concurrent(section))

    def preview(self) -> list[PlannedTrials]:
        return [PlannedTrials(self.max_trials)]

    def _first(self) -> list[Action]:
        return [self._create() for _ in range(min(self.max_trials, self.max_concurrent))]

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        return [self._create()] if self.trials.created < self.max_trials else []

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return self.trials.progress(fractions)


class _SingleSearch(_RandomSearch):
    """One trial."""

    kind = "single"

    def __init__(self, space: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(space, draws, max_trials=1, max_concurrent=1)

    @classmethod
    def of(cls, section: Mapping[str, Any], space: Mapping[str, Any], draws: Draws) -> Searcher:
        return _SingleSearch(space, draws)


class GridSearch(Searcher):
    """Every point of the grid once, from the last to the first, at most ``max_concurrent`` at a
    time (0: all)."""

    kind = "grid"

    def __init__(self, space: Mapping[str, Any], draws: Draws, max_concurrent: int) -> None:
        super().__init__(space, draws)
        self.grid = Grid.of(space)
        self.max_concurrent = max_concurrent or self.grid.size

    @classmethod
    def of(cls, section: Mapping[str, Any], space: Mapping[str, Any], draws: Draws) -> Searcher:
        return GridSearch(space, draws, max_concurrent(section))

    def preview(self) -> list[PlannedTrials]:
        return [PlannedTrials(self.grid.size)]

    def _first(self) -> list[Action]:
        created = [self._next() for _ in range(min(self.grid.size, self.max_concurrent))]
        return [action for actions in created for action in actions]

    def _next(self) -> list[Action]:
        left = self.grid.size - self.trials.created
        return [self._create(self.grid.point(left - 1))] if left else []

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        return self._next()

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return self.trials.progress(fractions)


SEARCHERS: Mapping[str, type[Searcher]] = MappingProxyType(
    {kind.kind: kind for kind in (_SingleSearch, _RandomSearch, GridSearch, AdaptiveAsha)}
)
"""The searchers by ``searcher.name``."""


def build(section: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> Searcher:
    """Build the searcher of a completed config, not yet started. Raises ConfigError for what
    ``experiment.complete`` would have refused.

    Args:
        section: the config's ``searcher``.
        hyperparameters: the space to search.
        seed: ``reproducibility.experiment_seed``.
    """
    return _built(section, hyperparameters, Stream(seed))


def restore(section: Mapping[str, Any], hyperparameters: Mapping[str, Any], snapshot: Mapping[str, Any]) -> Searcher:
    """Build the searcher of the same config in the state of ``snapshot``."""
    search = _built(section, hyperparameters, restored(snapshot["draws"]))
    search.restore(snapshot)
    return search


def begin_again(section: Mapping[str, Any], hyperparameters: Mapping[str, Any], draws: Mapping[str, Any]) -> Searcher:
    """Build a searcher, not yet started, that draws from their start the draws of a snapshot."""
    return _built(section, hyperparameters, restored(draws, from_start=True))


def _built(section: Mapping[str, Any], hyperparameters: Mapping[str, Any], draws: Draws) -> Searcher:
    kind = SEARCHERS.get(str(section.get("name")))
    if kind is None:
        raise ConfigError(
            "no such searcher", where="searcher.name", got=section.get("name"), expected=", ".join(SEARCHERS)
        )
    return kind.of(section, hyperparameters, draws)
