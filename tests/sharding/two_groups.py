"""A small model whose matrices are in one optimizer group and the rest in another, sharded, and its training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.sharding.parts import make_model, optimizer_of, run_update
from zero_trial.sharding.grouping import GroupingLimits
from zero_trial.zero import ShardedModel, ShardingSettings


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = (self.scale * x).square().mean()
        return out


def by_decay(module: nn.Module) -> list[list[nn.Parameter]]:
    """Matrices in one optimizer group, the rest in another."""
    params = list(module.parameters())
    return [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]


def build(stage: int, **kwargs: Any) -> ShardedModel:
    torch.manual_seed(0)
    module = Small()
    return make_model(
        module,
        stage,
        opt_groups=by_decay(module),
        settings=ShardingSettings(limits=GroupingLimits(bucket=100, persistence=10)),
        **kwargs,
    )


def train(model: ShardedModel, steps: int) -> None:
    for step in range(steps):
        loss = model.module(torch.linspace(-1, 1, 33).view(3, 11).to(model.policy.param) * (step + 1))
        model.begin_backward(reduce=True, last=True)
        loss.backward()
        model.end_backward()
        model.wait_before_writing()
        run_update(optimizer_of(model), 1.0 / model.mesh.data.size)
        model.reducer.reset()
        model.publish()
        model.wait()
