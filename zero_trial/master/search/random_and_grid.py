"""Random search, and a single trial as the smallest of it: a fixed number of samples, so many at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.experiment.space import Grid
from zero_trial.master.search.searcher import Action, Draws, ExitReason, Searcher


class RandomSearch(Searcher):
    """``max_trials`` samples, at most ``max_concurrent`` at a time (0: all). Invalid ones do not count and are replaced."""

    kind = "random"

    def __init__(self, space: Mapping[str, Any], draws: Draws, max_trials: int, max_concurrent: int) -> None:
        super().__init__(space, draws)
        self.max_trials = max_trials
        self.max_concurrent = max_concurrent or max_trials

    def _first(self) -> list[Action]:
        return [self._create() for _ in range(min(self.max_trials, self.max_concurrent))]

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        if reason is ExitReason.INVALID_HP and not self._may_replace_invalid():
            return []
        valid = self.trials.created - self.trials.count(ExitReason.INVALID_HP)
        return [self._create()] if valid < self.max_trials else []

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return self.trials.units_done(fractions, without_invalid=True) / self.max_trials


class SingleSearch(RandomSearch):
    """One trial."""

    kind = "single"

    def __init__(self, space: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(space, draws, max_trials=1, max_concurrent=1)


# Grid search: every point of the cartesian product once, from the last to the first, so many at a time.


class GridSearch(Searcher):
    """All points of ``space``, at most ``max_concurrent`` at a time (0: all). A point that is invalid is gone; nothing replaces it."""

    kind = "grid"

    def __init__(self, space: Mapping[str, Any], draws: Draws, max_concurrent: int) -> None:
        super().__init__(space, draws)
        self.grid = Grid.of(space)
        self.max_concurrent = max_concurrent or self.grid.size

    def _first(self) -> list[Action]:
        created = [self._next() for _ in range(min(self.grid.size, self.max_concurrent))]
        return [action for actions in created for action in actions]

    def _next(self) -> list[Action]:
        left = self.grid.size - self.trials.created
        return [self._create(self.grid.point(left - 1))] if left else []

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        return self._next()

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return self.trials.units_done(fractions, without_invalid=False) / self.grid.size
