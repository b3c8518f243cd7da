"""Tests for zero_trial/sharding/model.py: everything that is no ordinary float parameter starts alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_model, mesh_for
from tests.support.pool import Pools
from zero_trial.precision import dtype_policy
from zero_trial.sharding.grouping import GroupingLimits
from zero_trial.sharding.model import ManualGroups, sync_unmanaged
from zero_trial.zero import ShardingSettings

FREE_ALL = ShardingSettings(limits=GroupingLimits(persistence=0))


def test_what_is_not_managed_takes_the_policys_dtype() -> None:
    module = nn.BatchNorm1d(3)
    sync_unmanaged(module, {id(module.weight)}, dtype_policy("bf16"), ManualGroups(), mesh_for(0).data)
    assert module.weight.dtype == torch.float32
    assert module.bias.dtype == torch.bfloat16
    assert module.running_mean is not None and module.running_mean.dtype == torch.bfloat16
    assert module.num_batches_tracked is not None and module.num_batches_tracked.dtype == torch.int64


class Odd(nn.Module):
    """Everything that is no ordinary float parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.randn(40, 3), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(3, 40).t(), requires_grad=False)
        self.quantized = nn.Parameter(torch.randint(-9, 9, (50, 3), dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.randn(3, 4).t())
        self.register_buffer("row", torch.randn(1, 4).expand(3, 4))
        self.register_buffer("phase", torch.randn(5, dtype=torch.complex64))
        self.register_buffer("flag", torch.rand(4) > 0.5)
        self.register_buffer("count", torch.randint(9, ()))
        self.register_buffer("short", torch.randint(9, (3,), dtype=torch.int16))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x).sum() + self.frozen.sum() + self.quantized.float().sum()
        return out


def odd_things(stage: int) -> dict[str, Any]:
    mesh = mesh_for(stage)
    torch.manual_seed(mesh.rank)
    model = make_model(Odd(), stage, mesh=mesh, settings=FREE_ALL)
    loss = model.module(torch.ones(2, 6)).item()
    return {"loss": loss} | {name: value.float().abs().sum().item() if not value.is_complex() else value.abs().sum().item()
                             for name, value in model.module.state_dict().items()}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_ranks_start_from_rank_0_whatever_a_module_holds(ranks: Pools, stage: int) -> None:
    first, second = ranks(2).run(odd_things, stage)
    assert first == second
    torch.manual_seed(0)
    plain = Odd()
    assert first["loss"] == pytest.approx(plain(torch.ones(2, 6)).item(), rel=1e-5)
    assert first["phase"] == pytest.approx(plain.phase.abs().sum().item())
