"""The schedule of the average of the weights against diffusers' formula, and its refusals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zero_trial.errors import TrialError
from zero_trial.sharding.ema import KIND, EmaSchedule, WeightAverage


def diffusers_decay(step: int, after: int, decay: float, inv_gamma: float, power: float) -> float:
    """EMAModel.get_decay with use_ema_warmup, at its ``optimization_step``."""
    step = max(0, step - after - 1)
    return 0.0 if step <= 0 else min(decay, 1 - (1 + step / inv_gamma) ** -power)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (EmaSchedule(0.9), [1.0, 1 - 0.9, 1 - 0.9, 1 - 0.9]),
        (EmaSchedule(0.9, update_after_step=2), [1.0, 1.0, 1.0, 1 - 0.9, 1 - 0.9]),
        (EmaSchedule(0.9, update_every=2), [1.0, None, 1 - 0.9, None, 1 - 0.9]),
        (EmaSchedule(0.9, update_after_step=1, update_every=3), [1.0, 1.0, None, None, 1 - 0.9, None]),
        (EmaSchedule(0.6, inv_gamma=1.0, power=1.0), [1.0, 1 - 0.5, 1 - 0.6, 1 - 0.6]),
    ],
)
def test_the_schedule(schedule: EmaSchedule, shares: Sequence[float | None]) -> None:
    assert [schedule.share(step) for step in range(1, len(shares) + 1)] == shares


def test_the_warm_up_is_that_of_diffusers() -> None:
    for after in (0, 7):
        schedule = EmaSchedule(0.99, update_after_step=after, inv_gamma=3.0, power=0.75)
        for step in range(1, 2000):
            assert schedule.share(step) == 1 - diffusers_decay(step, after, 0.99, 3.0, 0.75)


def test_an_optimizer_s_own_state_of_this_name_is_refused() -> None:
    average, weights, state = WeightAverage(EmaSchedule(0.9)), [torch.ones(3)], defaultdict[Any, Any](dict)
    average.begin_step()
    with pytest.raises(TrialError, match="state of its own"), average.following(weights, state):
        state[weights[0]][KIND] = torch.zeros(3)


def test_a_step_that_fails_keeps_the_average() -> None:
    average, weights, state = WeightAverage(EmaSchedule(0.9)), [torch.ones(3)], defaultdict[Any, Any](dict)
    average.begin_step()
    with pytest.raises(ZeroDivisionError), average.following(weights, state):
        raise ZeroDivisionError
    assert torch.equal(state[weights[0]][KIND], weights[0])
