"""The schedule of the average of the weights against diffusers' formula, and steps that fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zero_trial.ds_config.keys_training import EmaSection
from zero_trial.errors import TrialError
from zero_trial.sharding.ema import KIND, WeightAverage, share


@pytest.mark.parametrize(
    ("section", "shares"),
    [
        (EmaSection(0.9), [1.0, 1 - 0.9, 1 - 0.9, 1 - 0.9]),
        (EmaSection(0.9, update_after_step=2), [1.0, 1.0, 1.0, 1 - 0.9, 1 - 0.9]),
        (EmaSection(0.9, update_every=2), [1.0, None, 1 - 0.9, None, 1 - 0.9]),
        (EmaSection(0.9, update_after_step=1, update_every=3), [1.0, 1.0, None, None, 1 - 0.9, None]),
        (EmaSection(0.6, use_ema_warmup=True, power=1.0), [1.0, 1 - 0.5, 1 - 0.6, 1 - 0.6]),
        (  # EMAModel.get_decay at its ``optimization_step``
            EmaSection(0.99, update_after_step=7, use_ema_warmup=True, inv_gamma=3.0, power=0.75),
            [1.0] * 8 + [1 - min(0.99, 1 - (1 + step / 3.0) ** -0.75) for step in range(1, 2000)],
        ),
    ],
)
def test_the_schedule(section: EmaSection, shares: Sequence[float | None]) -> None:
    assert [share(section, step) for step in range(1, len(shares) + 1)] == shares


def test_a_step_that_fails_keeps_the_average() -> None:
    average, weights, state = WeightAverage(EmaSection(0.9)), [torch.ones(3)], defaultdict[Any, Any](dict)
    with pytest.raises(ZeroDivisionError), average.following(weights, state):
        raise ZeroDivisionError
    assert torch.equal(state[weights[0]][KIND], weights[0])


def test_a_state_of_the_optimizer_is_not_overwritten() -> None:
    average, weights, state = WeightAverage(EmaSection(0.9)), [torch.ones(3)], defaultdict[Any, Any](dict)
    with pytest.raises(TrialError, match="state with the same name"), average.following(weights, state):
        state[weights[0]][KIND] = torch.zeros(3)
