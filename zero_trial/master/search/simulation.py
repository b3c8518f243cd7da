"""Simulates a search with synthetic learning curves: trials created and stopped, and units spent.

A curve maps the fraction of a training to a loss. Every trial has a different curve; the same seed
gives the same curve.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from zero_trial.master.search.searcher import Action, AdaptiveAsha, Create, ExitReason, Searcher, Stop

Curve: TypeAlias = Callable[[float], float]  # fraction of the training (0 to 1) -> loss
_START = 5.0


def power(seed: int) -> Curve:
    """Return a power law from 5 down to a final loss between 1 and 3: early leaders usually win."""
    stream = random.Random(seed)
    final, exponent = stream.uniform(1.0, 3.0), stream.uniform(0.8, 1.2)
    scale = (_START - final) / (1.0 - 100.0**-exponent)
    return lambda fraction: final + scale * ((1.0 + 99.0 * fraction) ** -exponent - 100.0**-exponent)


def crossing(seed: int) -> Curve:
    """Return a curve with which slow starters end best: the hardest case for early stopping."""
    quality = random.Random(seed).random()
    return lambda fraction: _START - (1.0 + 3.0 * quality) * fraction ** (0.25 + 2.0 * quality)


def noise(seed: int) -> Curve:
    """Return a loss that does not depend on the trial: the outcome of the search is random."""
    return lambda fraction: random.Random(f"{seed}/{fraction:.6f}").uniform(1.0, _START)


CURVES: Mapping[str, Callable[[int], Curve]] = MappingProxyType({"power": power, "crossing": crossing, "noise": noise})


Invalid = Callable[[Mapping[str, Any]], str | None]
"""Why a set of hyperparameters cannot be trained, or None."""


@dataclass(frozen=True)
class Setup:
    """Settings of a simulation: trials train ``length`` units and validate every ``period``."""

    metric: str
    unit: str
    length: int
    period: int
    smaller_is_better: bool
    curve: Callable[[int], Curve]
    invalid: Invalid = lambda hparams: None


@dataclass(frozen=True)
class RungCount:
    """Counts of one rung: trials that reached it, and trials that were stopped there."""

    bracket: int
    units: int
    reached: int
    stopped: int


@dataclass(frozen=True)
class Simulated:
    """The result of a simulated search.

    ``spent`` and ``whole`` are total units of all valid trials: as searched, and if all trials had
    trained to their full length. ``elapsed`` is the duration if every trial has its own machine.
    """

    trials: int
    spent: int
    whole: int
    elapsed: int
    rungs: tuple[RungCount, ...]
    pruned: Mapping[str, int]
    best: Mapping[str, Any] | None
    best_metric: float | None
    failed: bool


@dataclass
class _Running:
    hparams: Mapping[str, Any]
    curve: Curve
    since: int
    done: int = 0


@dataclass
class _Stage:
    """The state of a simulation between two events. ``due`` holds (time, order, request id)."""

    setup: Setup
    running: dict[str, _Running] = field(default_factory=dict)
    due: list[tuple[int, int, str]] = field(default_factory=list)
    now: int = 0
    order: int = 0
    spent: int = 0
    valid: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    best: tuple[float, Mapping[str, Any]] | None = None

    def schedule(self, request_id: str, trial: _Running) -> None:
        self.order += 1
        upto = min(trial.done + self.setup.period, self.setup.length)
        heapq.heappush(self.due, (trial.since + upto, self.order, request_id))


def simulate(search: Searcher, setup: Setup) -> Simulated:
    """Run ``search``, not yet started, to its end. Deterministic: trials that are due at the same
    time report in order of creation."""
    stage = _Stage(setup)
    _act(search, stage, search.start())
    while stage.due:
        stage.now, _, request_id = heapq.heappop(stage.due)
        trial = stage.running.get(request_id)
        if trial is not None:
            _measure(search, stage, request_id, trial)
    best = stage.best or (None, None)
    return Simulated(
        trials=stage.valid,
        spent=stage.spent,
        whole=stage.valid * setup.length,
        elapsed=stage.now,
        rungs=_rungs(search, setup, stage.valid),
        pruned=dict(stage.pruned.most_common()),
        best=best[1],
        best_metric=best[0],
        failed=stage.valid == 0,
    )


def _act(search: Searcher, stage: _Stage, actions: list[Action]) -> None:
    """Carry out the actions of the search, and all follow-up actions."""
    waiting = list(actions)
    while waiting:
        action = waiting.pop(0)
        if isinstance(action, Create):
            why = stage.setup.invalid(action.hparams)
            if why is not None:
                stage.pruned[why] += 1
                waiting += search.on_exited(action.request_id, ExitReason.COMPLETED)
                continue
            stage.valid += 1
            trial = _Running(action.hparams, stage.setup.curve(action.seed), stage.now)
            stage.running[action.request_id] = trial
            stage.schedule(action.request_id, trial)
        elif isinstance(action, Stop):
            del stage.running[action.request_id]
            waiting += search.on_exited(action.request_id, ExitReason.COMPLETED)


def _measure(search: Searcher, stage: _Stage, request_id: str, trial: _Running) -> None:
    setup = stage.setup
    stage.spent += stage.now - trial.since - trial.done
    trial.done = stage.now - trial.since
    loss = trial.curve(trial.done / setup.length)
    value = loss if setup.smaller_is_better else -loss
    if stage.best is None or (value < stage.best[0] if setup.smaller_is_better else value > stage.best[0]):
        stage.best = (value, trial.hparams)
    _act(search, stage, search.on_validation(request_id, {setup.metric: value, setup.unit: trial.done}))
    if request_id not in stage.running:
        return
    if trial.done < setup.length:
        stage.schedule(request_id, trial)
    else:
        del stage.running[request_id]
        _act(search, stage, search.on_exited(request_id, ExitReason.COMPLETED))


def _rungs(search: Searcher, setup: Setup, valid: int) -> tuple[RungCount, ...]:
    if not isinstance(search, AdaptiveAsha):
        return (RungCount(1, setup.length, valid, 0),)
    found = []
    for number, bracket in enumerate(search.brackets, 1):
        top = len(bracket.rungs) - 1
        for index, rung in enumerate(bracket.rungs):
            ended_here = sum(bracket.position[request_id] == index for _, request_id in rung.entries)
            found.append(RungCount(number, rung.units, len(rung.entries), ended_here if index < top else 0))
    return tuple(found)
