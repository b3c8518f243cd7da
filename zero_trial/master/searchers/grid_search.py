"""Grid search: every point of the cartesian product once, from the last to the first, so many at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.master.searchers.actions import Action, ExitReason
from zero_trial.master.searchers.draws import Draws
from zero_trial.master.searchers.grid_points import Grid
from zero_trial.master.searchers.searcher import Searcher


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
