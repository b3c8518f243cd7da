"""Behaviour of models that are parallel themselves: one gradient norm, one verdict and one culprit
for all their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_trial
from tests.engine.test_contents import ClientMpu
from tests.support.dense import STAGES
from tests.support.pool import Pools

SGD = {"type": "SGD", "params": {"lr": 1.0}}


class Parted(nn.Module):
    """A layer that all parts hold and compute alike, and a vector of which each part has its own
    elements."""

    def __init__(self, parts: list[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.common = nn.Linear(4, 3)
        with torch.no_grad():
            self.common.weight.copy_(torch.randn(3, 4, generator=generator))
            self.common.bias.zero_()
        self.parts = parts
        self.own = nn.ParameterList(torch.full((5 + part,), 1.0 + part) for part in parts)
        for param in self.own:
            param.tensor_model_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = sum((part + 1) * param.square().sum() for part, param in zip(self.parts, self.own, strict=True))
        return self.common(x).square().mean() + own


class FullMpu(ClientMpu):
    """What Megatron's gives: groups of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        ranks = list(range(dist.get_world_size()))
        model = [dist.new_group(ranks[start : start + 2]) for start in ranks[::2]]
        self._model = model[dist.get_rank() // 2]

    def get_model_parallel_group(self) -> Any:
        return self._model


def start(stage: str, by_client: bool, extra: dict[str, Any] | None = None) -> tuple[zero_trial.Engine, int]:
    part = dist.get_rank() % 2
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "gradient_clipping": 0.5}
    config |= {"zero_optimization": STAGES[stage]} | (extra or {})
    if by_client:
        return zero_trial.initialize(model=Parted([part]), config=config, mpu=FullMpu())[0], part
    return zero_trial.initialize(model=Parted([part]), config=config | {"mesh": {"model": 2}})[0], part


def lines(index: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (index + 1)


def clipped(stage: str, by_client: bool) -> tuple[float | None, dict[str, torch.Tensor]]:
    engine, part = start(stage, by_client)
    engine.backward(engine(lines(engine.mesh.data.index)))
    engine.step()
    state = engine.module_state_dict()
    return engine.get_global_grad_norm(), {
        name.replace("own.0", f"own.{part}"): value.clone() for name, value in state.items()
    }


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.parametrize(("stage", "world"), [("zero0", 2), ("zero0", 4), ("zero1", 4), ("zero3-free", 4)])
def test_parts_clip_by_the_norm_of_the_whole(ranks: Pools, stage: str, world: int, by_client: bool) -> None:
    """A parameter that all parts hold counts once. The dense model has all parts in one process."""
    dense = Parted([0, 1])
    for index in range(world // 2):
        (dense(lines(index)) / (world // 2)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5))
    torch.optim.SGD(dense.parameters(), lr=1.0).step()
    expected = dict(dense.named_parameters())
    for found, state in ranks(world).run(clipped, stage, by_client):
        assert found == pytest.approx(norm, rel=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-6, atol=1e-7)


def overflowing(stage: str, bad_part: int, name: str) -> tuple[int, float, Any]:
    """A gradient of one part is not finite, in a parameter that counts there or not."""
    engine, part = start(stage, False, {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}})
    if part == bad_part and engine.mesh.data.index == 0:
        dict(engine.module.named_parameters())[name].register_hook(lambda grad: torch.full_like(grad, float("nan")))
    engine.backward(engine(lines(0).half()))
    engine.step()
    seen = engine.last_nonfinite
    return (
        engine.skipped_steps,
        engine.outcome.result.loss_scale.scale,
        (seen.rank, seen.parameter) if seen is not None else None,
    )


@pytest.mark.parametrize(("part", "name"), [(0, "own.0"), (1, "own.0"), (1, "common.weight")])
@pytest.mark.parametrize(("stage", "world"), [("zero0", 2), ("zero1", 4)])
def test_what_one_part_overflows_all_skip(ranks: Pools, stage: str, world: int, part: int, name: str) -> None:
    for skipped, scale, culprit in ranks(world).run(overflowing, stage, part, name):
        assert (skipped, scale) == (1, 128.0)
        assert culprit == (part, name)
