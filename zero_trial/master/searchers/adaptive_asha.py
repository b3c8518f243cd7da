"""adaptive_asha: brackets side by side, each a stopping-based asynchronous successive halving, as in Determined 0.38."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zero_trial.master.searchers.actions import Action, ExitReason
from zero_trial.master.searchers.brackets import Budget, divide
from zero_trial.master.searchers.draws import Draws
from zero_trial.master.searchers.rungs import WORST, Bracket
from zero_trial.master.searchers.searcher import MetricMissing, Searcher

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # how JSON clients write what JSON cannot


class AdaptiveAsha(Searcher):
    """A trial runs until its validation says that it is not among the best 1/divisor of its rung, or has reached the top.

    A trial belongs to the bracket that created it. ``metric`` and ``time_metric`` are both looked up in the validation metrics. Not a number
    counts as the worst value there is.
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

    def bracket_of(self, request_id: str) -> Bracket:
        """The bracket that created a trial."""
        return next(bracket for bracket in self.brackets if request_id in bracket.position)

    def _first(self) -> list[Action]:
        return [self._enter(bracket) for bracket in self.brackets for _ in range(bracket.first_trials())]

    def _enter(self, bracket: Bracket) -> Action:
        created = self._create()
        bracket.position[created.request_id] = 0
        return created

    def _enter_if_below(self, bracket: Bracket) -> list[Action]:
        return [self._enter(bracket)] if bracket.valid < bracket.max_trials else []

    def _validated(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        time = _number(metrics, self.time_metric, "searcher.time_metric")
        value = _number(metrics, self.metric, "searcher.metric")
        if not math.isfinite(time):
            raise _missing(self.time_metric, "searcher.time_metric", time)
        bracket = self.bracket_of(request_id)
        metric = WORST if math.isnan(value) else min(max(self.sign * value, -WORST), WORST)
        if not bracket.climb(request_id, int(time), metric):
            return []
        return [self._stop(request_id), *self._enter_if_below(bracket)]

    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]:
        bracket = self.bracket_of(request_id)
        bracket.ended += 1
        if reason is ExitReason.INVALID_HP:
            bracket.drop_invalid(request_id)
            return [self._enter(bracket)] if self._may_replace_invalid() else []
        if reason is ExitReason.COMPLETED or was_stopping:
            return []
        bracket.drop_early(request_id)
        return self._enter_if_below(bracket)

    def _progress(self, fractions: Mapping[str, float]) -> float:
        return sum(bracket.progress() for bracket in self.brackets) / len(self.brackets)

    def _own_state(self) -> dict[str, Any]:
        return {"brackets": [bracket.as_json() for bracket in self.brackets]}

    def _take_own(self, snapshot: Mapping[str, Any]) -> None:
        for bracket, state in zip(self.brackets, snapshot["brackets"], strict=True):
            bracket.take(state)


def _number(metrics: Mapping[str, Any], name: str, where: str) -> float:
    value = metrics.get(name)
    if isinstance(value, str) and value in _SPELLED:
        return _SPELLED[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _missing(name, where, value, metrics)
    return float(value)


def _missing(name: str, where: str, value: Any, metrics: Mapping[str, Any] | None = None) -> MetricMissing:
    there = ", ".join(sorted(metrics)) if metrics else "no metrics"
    got = f"{there} in the validation metrics" if value is None else repr(value)
    return MetricMissing(f'the validation has no number "{name}"', where=where, got=got)
