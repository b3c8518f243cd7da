"""How fast a trial's steps are: the metric of a search for speed, and how it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

SPEED_METRIC = "zero_trial_steps_per_second"
"""As ``searcher.metric``: a trial reports its speed, and neither evaluates nor saves."""

WARM_UP = 2  # steps that are not measured


def speed_of(times: Sequence[float], warm_up: int) -> tuple[int, float]:
    """Return how many steps have been measured, and their speed: one over the median of their
    seconds.

    Args:
        times: when each step was complete; the first one's begin is not known.
        warm_up: so many steps are left out, at least one.
    """
    spans = [after - before for before, after in pairwise(times[max(warm_up, 1) - 1 :])]
    return len(spans), 1 / max(median(spans), 1e-9) if spans else 0.0
