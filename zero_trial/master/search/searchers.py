"""The searchers single, random and grid, and the table from which an experiment's searcher is
built.

A new searcher is a subclass of `Searcher` with a row in SEARCHERS, and its keys in
``experiment/sections.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.experiment.space import Grid
from zero_trial.master.search.adaptive_asha import AdaptiveAsha
from zero_trial.master.search.draws import Draws, Stream, restored
from zero_trial.master.search.searcher import Action, ExitReason, PlannedTrials, Searcher, max_concurrent


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
        self.grid = Grid.of(space, draws.power)
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
