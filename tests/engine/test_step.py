"""Steps that are applied or skipped, and what a gradient that is not finite is called.

Overflows on several ranks: test_behaviour_precision.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.models import make_engine
from zero_trial.engine.outcome import NonFiniteStep, with_culprit
from zero_trial.errors import Diverged, TrialError
from zero_trial.sharding.guards.freed import unasked


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
    result = engine.outcome.result
    assert result.norm is None and not result.applied
    assert step(engine, 2.0) == pytest.approx(2.5)
    assert engine.outcome.result is result
    assert (result.norm, result.applied, result.skipped, result.nonfinite) == (2.0, True, 0, None)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_without_a_finite_norm_is_skipped(bad: float) -> None:
    engine = one_weight()
    assert step(engine, bad) == 3.0
    result = engine.outcome.result
    assert not result.applied and result.skipped == 1 and not math.isfinite(result.norm or 0.0)
    assert result.nonfinite is not None and result.nonfinite.parameter == "weight"
    assert step(engine, 1.0) == 2.0 and result.applied and result.skipped == 1


def test_the_engine_shows_the_outcome():
    engine = one_weight()
    step(engine, math.inf)
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    result = engine.outcome.result
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


@pytest.mark.parametrize(("rank", "who"), [(3, "on rank 3"), (0, "on rank 0"), (None, "in the sum over ranks")])
def test_one_line_says_which_step_parameter_and_rank(rank: int | None, who: str):
    assert (
        NonFiniteStep(7, rank, "head.weight").describe() == f"step 7: the gradient of head.weight is not finite {who}"
    )


def test_the_end_of_a_run_names_the_culprit():
    error = Diverged("no scale left", where="loss scale", got="scale 1", expected="more", fix="Use bf16.")
    assert with_culprit(error, None) is error
    text = str(with_culprit(error, NonFiniteStep(2, 1, "a.b")))
    assert (
        text
        == "loss scale: no scale left: got scale 1, and step 2: the gradient of a.b is not finite on rank 1, expected more. Use bf16."
    )


class Outside(nn.Module):
    """Reads the weights of blocks whose forward never runs; ``unasked``: as the functions of a C++
    extension do it."""

    def __init__(self, unasked: bool) -> None:
        super().__init__()
        self.unasked = unasked
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with unasked() if self.unasked else contextlib.nullcontext():
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight, layer.bias)
        return x.sum()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(("threshold", "reported"), [(0, True), (1000, False)])
def test_weights_read_outside_their_forward_train_nothing(threshold: int, reported: bool, asked: bool):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": threshold, "module_granularity_threshold": 1},
    }
    engine = zero_trial.initialize(model=Outside(not asked), config=config)[0]
    if reported and asked:
        with pytest.raises(TrialError, match=r"linear: .*got layers.0.weight"):
            engine(torch.ones(1, 4))
        return
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    assert engine.was_step_applied() != reported  # what torch does not ask about reads NaN
