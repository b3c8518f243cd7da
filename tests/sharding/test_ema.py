"""The average of the weights by itself: its schedule against torch's and diffusers' formulas, and
the column during and between an optimizer's steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


class Steps:
    """Weights with an average, and torch's average of the same weights."""

    def __init__(self, schedule: EmaSchedule, dtype: torch.dtype = torch.float32) -> None:
        self.holder = nn.ParameterList([torch.randn(shape, dtype=dtype) for shape in ((7,), (3, 5), ())])
        self.weights: list[torch.Tensor] = list(self.holder)
        self.state: Any = defaultdict(dict)
        self.average = WeightAverage(schedule)
        self.torch = AveragedModel(self.holder, multi_avg_fn=get_ema_multi_avg_fn(schedule.decay))

    @torch.no_grad()
    def step(self) -> None:
        self.average.begin_step()
        with self.average.following(self.weights, self.state):
            assert all(KIND not in state for state in self.state.values())
            for weight in self.weights:
                weight += torch.randn(weight.shape, dtype=weight.dtype)
        self.torch.update_parameters(self.holder)

    def same(self) -> bool:
        return all(
            torch.equal(self.state[own][KIND], theirs)
            for own, theirs in zip(self.weights, self.torch.module.parameters(), strict=True)
        )


def test_it_is_torch_s_average() -> None:
    for decay in (0.9, 0.3):
        steps = Steps(EmaSchedule(decay))
        for _ in range(5):
            steps.step()
            assert steps.same()


def test_a_step_that_fails_keeps_it() -> None:
    steps = Steps(EmaSchedule(0.9))
    steps.step()
    with pytest.raises(ZeroDivisionError), steps.average.following(steps.weights, steps.state):
        raise ZeroDivisionError
    assert steps.same()


def test_places_are_changed_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_trial.sharding.ema._CHUNK", 4)
    steps = Steps(EmaSchedule(0.9))
    for _ in range(3):
        steps.step()
    before = [(weight.detach().clone(), steps.state[weight][KIND].clone()) for weight in steps.weights]
    steps.average.swap(steps.weights, steps.state)
    for weight, (value, average) in zip(steps.weights, before, strict=True):
        assert torch.equal(weight, average) and torch.equal(steps.state[weight][KIND], value)
    with pytest.raises(TrialError, match=r"engine\.step"):
        steps.average.begin_step()
    steps.average.swap(steps.weights, steps.state)
    for weight, (value, average) in zip(steps.weights, before, strict=True):
        assert torch.equal(weight, value) and torch.equal(steps.state[weight][KIND], average)


def test_an_optimizer_s_own_state_of_this_name_is_refused() -> None:
    steps = Steps(EmaSchedule(0.9))
    steps.average.begin_step()
    with (
        pytest.raises(TrialError, match="state of its own"),
        steps.average.following(steps.weights, steps.state),
    ):
        steps.state[steps.weights[0]][KIND] = torch.zeros(7)


def test_after_a_restart_it_begins_with_the_weights_of_before_the_step() -> None:
    steps = Steps(EmaSchedule(0.5, update_after_step=10))
    steps.step()
    steps.average.restart(steps.state, steps.average.schedule.first)
    before = steps.weights[0].detach().clone()
    steps.step()
    weight = steps.weights[0].detach()
    assert torch.equal(steps.state[steps.weights[0]][KIND], before.lerp(weight, 0.5))
