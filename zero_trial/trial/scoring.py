"""The searcher's metric among the validation metrics, and which of two values is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.trial.metrics import without_counters


@dataclass(frozen=True)
class Score:
    """``metric`` None: nothing is scored."""

    metric: str | None
    smaller_is_better: bool = True

    def of(self, metrics: Mapping[str, Any]) -> float | None:
        """The metric's value. Raises ConfigError, naming what there is, if it is missing or no scalar."""
        if self.metric is None:
            return None
        value = metrics.get(self.metric)
        if value is not None and not isinstance(value, (int, float)):
            raise ConfigError(
                f"searcher.metric {self.metric!r} is no scalar",
                where="searcher.metric",
                got=f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__,
                expected="one number",
                fix="Return its .mean() from evaluate_batch.",
            )
        if value is None:
            raise ConfigError(
                f"searcher.metric {self.metric!r} was never reported",
                where="searcher.metric",
                got=f"the trial reports {sorted(without_counters(metrics))}",
                fix="Name one of these.",
            )
        return float(value)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` beats ``best``; anything beats nothing, and nan beats nothing at all."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value < best if self.smaller_is_better else value > best
