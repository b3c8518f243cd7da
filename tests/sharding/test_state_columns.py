"""Tests for zero_trial/sharding/offload/nvme_optimizer.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_trial.ops.optimizers import FusedAdam, Lion
from zero_trial.sharding.offload.nvme_optimizer import StateColumn, state_columns


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))]


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (torch.optim.AdamW, ["exp_avg", "exp_avg_sq"]),
        (lambda params: torch.optim.Adam(params, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (lambda params: torch.optim.AdamW(params, fused=True), ["exp_avg", "exp_avg_sq"]),
        (lambda params: torch.optim.SGD(params, momentum=0.9), ["momentum_buffer"]),
        (torch.optim.SGD, []),
        (torch.optim.Adagrad, ["sum"]),
        (FusedAdam, ["exp_avg", "exp_avg_sq"]),
        (Lion, ["exp_avg"]),
    ],
)
def test_the_state_that_an_optimizer_will_have(build: Any, kinds: list[str]) -> None:
    base = build(weights())
    state, values = (
        dict(base.state),
        [weight.clone() for opt_group in base.param_groups for weight in opt_group["params"]],
    )
    assert state_columns(base) == [StateColumn(kind, torch.float32) for kind in kinds]
    assert dict(base.state) == state, "nothing is left behind"
    after = [weight for opt_group in base.param_groups for weight in opt_group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))


def test_groups_may_differ() -> None:
    one, two = weights()
    base = torch.optim.SGD([{"params": [one], "momentum": 0.0}, {"params": [two], "momentum": 0.9}], lr=0.1)
    assert state_columns(base) == [StateColumn("momentum_buffer", torch.float32)]


def test_nobody_hears_of_it_and_the_schedule_does_not_move() -> None:
    base = torch.optim.AdamW(weights())
    schedule = torch.optim.lr_scheduler.StepLR(base, 1)
    heard: list[Any] = []
    base.register_step_post_hook(lambda *_: heard.append(1))
    state_columns(base)
    assert heard == [] and schedule.last_epoch == 0 and getattr(base, "_opt_called", False) is False


def test_state_of_another_width() -> None:
    class Small(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for opt_group in self.param_groups:
                for weight in opt_group["params"]:
                    self.state[weight] = {"q": torch.zeros_like(weight, dtype=torch.uint8), "rows": torch.zeros(3)}

    assert state_columns(Small(weights())) == [StateColumn("q", torch.uint8)]


@pytest.mark.parametrize("build", [FusedAdam, torch.optim.AdamW])
def test_a_rehearsal_with_imagined_tensors_finds_them_too(build: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        base = build(weights())
        assert [column.kind for column in state_columns(base)] == ["exp_avg", "exp_avg_sq"]
    assert not base.state
