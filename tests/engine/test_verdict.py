"""Steps that the host decides. Overflows on several ranks: test_behaviour_precision; steps that the device decides: test_deferred_step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.models import make_engine


def one_weight(value: float = 3.0, **config: object) -> zero_trial.Engine:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([value]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    defaults = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    return make_engine(Model, defaults | config)


def step(engine: zero_trial.Engine, gradient: float) -> float:
    engine.backward(engine(torch.tensor([gradient])))
    engine.step()
    return float(engine.module.weight.detach())


def test_a_step_is_applied_clipped_and_counted():
    engine = one_weight(gradient_clipping=0.5)
    result = engine.outcome.result()
    assert not engine.outcome.deferred and result.norm is None and not result.applied and not engine.outcome.open
    assert step(engine, 2.0) == pytest.approx(2.5)
    assert engine.outcome.result() is result
    assert (result.norm, result.applied, result.skipped, result.nonfinite) == (2.0, True, 0, None)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_without_a_finite_norm_is_skipped(bad: float) -> None:
    engine = one_weight()
    assert step(engine, bad) == 3.0
    result = engine.outcome.result()
    assert not result.applied and result.skipped == 1 and not math.isfinite(result.norm or 0.0)
    assert result.nonfinite is not None and result.nonfinite.parameter == "weight"
    assert step(engine, 1.0) == 2.0 and result.applied and result.skipped == 1


def test_gradients_are_divided_by_ranks_wire_and_loss_scale():
    engine = one_weight(fp16={"enabled": True, "loss_scale": 8})
    assert engine.outcome.gradient_multiplier() == 1 / 8
    assert engine.sharded.gradient_multiplier() == 1 / 8


def test_the_engine_shows_the_outcome():
    engine = one_weight()
    step(engine, math.inf)
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    result = engine.outcome.result()
    assert (
        engine.last_nonfinite is result.nonfinite and engine.loss_scale == engine.cur_scale == result.loss_scale.scale
    )


def test_between_boundaries_no_step_was_applied():
    engine = one_weight(train_batch_size=2, train_micro_batch_size_per_gpu=1)
    step(engine, 1.0)
    assert not engine.was_step_applied()
    step(engine, 1.0)
    assert engine.was_step_applied()
    step(engine, 1.0)
    assert not engine.was_step_applied()


def test_which_steps_were_skipped():
    engine = one_weight()
    for gradient in (math.inf, 1.0, math.nan, 1.0):
        step(engine, gradient)
    ranges = ((0, 4), (0, 1), (1, 2), (2, 3), (3, 4), (0, 0))
    assert [engine.skipped_between(first, end) for first, end in ranges] == [2, 1, 0, 1, 0, 0]
