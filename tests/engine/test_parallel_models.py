"""What a checkpoint calls things, and models that are parallel themselves: every part is saved
under its own names, and none over another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_trial
from tests.support.dense import STAGES, Turn
from tests.support.models import ADAMW
from tests.support.pool import Pools
from zero_trial.errors import CheckpointError, TrialError


class Columns(nn.Module):
    """This model-parallel rank's columns, beside a norm that all of them have."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.own = nn.Linear(6, 5 + part)  # also unequal parts
        with torch.no_grad():
            self.own.weight.add_(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.norm(x))


class ClientMpu:
    """Ranks 0, 2 ... see other data than each other, and the same as their odd neighbours, which
    hold the other half of the model."""

    def __init__(self) -> None:
        ranks = list(range(dist.get_world_size()))
        groups = [dist.new_group(ranks[part::2]) for part in range(2)]
        self.part = dist.get_rank() % 2
        self.group = groups[self.part]

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_model_parallel_rank(self) -> int:
        return self.part

    def get_model_parallel_world_size(self) -> int:
        return 2


def start(model: nn.Module, stage: str, mpu: Any = None, **config: Any) -> zero_trial.Engine:
    """The engine of this rank's part, whose ranks the mesh or an mpu knows."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": STAGES[stage]} | config
    config |= {} if mpu else {"mesh": {"model": 2}}
    return zero_trial.initialize(model=model, config=config, mpu=mpu)[0]


def build(stage: str, by_client: bool) -> tuple[zero_trial.Engine, int]:
    part = dist.get_rank() % 2
    torch.manual_seed(1)
    engine = start(Columns(part), stage, ClientMpu() if by_client else None, optimizer=ADAMW)
    assert engine.mesh.model_part == (part, 2)
    return engine, part


def advance(engine: zero_trial.Engine, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.backward(engine(Turn(step, 0, engine.mesh.data.index).normal(4, 6)).square().mean())
        engine.step()
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def parted(folder: str, stage: str, by_client: bool) -> bool:
    engine, part = build(stage, by_client)
    saved = advance(engine, range(3))
    engine.save_checkpoint(folder, tag="a")
    later = advance(engine, range(3, 5))
    again, _ = build(stage, by_client)
    again.load_checkpoint(folder)
    loaded = again.module_state_dict()
    same = all(torch.equal(loaded[name], value) for name, value in saved.items()) and saved["own.weight"].shape == (
        5 + part,
        6,
    )
    return same and all(torch.equal(value, later[name]) for name, value in advance(again, range(3, 5)).items())


@pytest.mark.parametrize(
    ("size", "stage", "by_client"), [(2, "zero0", True), (4, "zero1", False), (4, "zero3-free", True)]
)
def test_both_parts_of_a_parallel_model_come_back(
    ranks: Pools, tmp_path: Path, size: int, stage: str, by_client: bool
) -> None:
    assert ranks(size).run(parted, str(tmp_path), stage, by_client) == [True] * size


def saved_part(folder: str, stage: str) -> list[float]:
    engine, _ = build(stage, False)
    state = advance(engine, range(2))
    engine.save_checkpoint(folder, tag="a")
    return [value.double().sum().item() for value in state.values()]


def loaded_part(folder: str, stage: str) -> list[float]:
    engine, _ = build(stage, False)
    engine.load_checkpoint(folder)
    return [value.double().sum().item() for value in engine.module_state_dict().values()]


def test_parts_may_have_other_numbers_of_data_parallel_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Four ranks at stage 2 are two parts of two; two ranks at stage 3 are two parts of one."""
    wrote = ranks(4).run(saved_part, str(tmp_path), "zero2")
    assert ranks(2).run(loaded_part, str(tmp_path), "zero3") == wrote[:2]


def whole_weights(folder: str) -> str:
    engine, _ = build("zero0", False)
    with pytest.raises(TrialError) as caught:
        engine.save_16bit_model(folder)
    return str(caught.value)


def test_no_rank_has_the_whole(ranks: Pools, tmp_path: Path) -> None:
    (said, _) = ranks(2).run(whole_weights, str(tmp_path))
    assert said.startswith(
        "engine.save_16bit_model: no rank has the whole model: the model is parallel itself: got 2 parts. Use engine.save_checkpoint"
    )
    assert list(tmp_path.iterdir()) == []


def test_parts_are_not_joined_by_accident(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(saved_part, str(tmp_path), "zero0")
    engine, *_ = zero_trial.initialize(model=Columns(0), config={"train_batch_size": 4, "optimizer": ADAMW})
    with pytest.raises(
        CheckpointError, match=r"a different number of parallel parts: got 2, expected 1\. Start with mesh\.model: 2"
    ):
        engine.load_checkpoint(str(tmp_path))


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


def lines(index: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (index + 1)


def clipped(stage: str, by_client: bool) -> tuple[float | None, dict[str, torch.Tensor]]:
    part = dist.get_rank() % 2
    mpu = FullMpu() if by_client else None
    engine = start(Parted([part]), stage, mpu, optimizer=SGD, gradient_clipping=0.5)
    engine.backward(engine(lines(engine.mesh.data.index)))
    engine.step()
    state = engine.module_state_dict()
    return engine.get_global_grad_norm(), {
        name.replace("own.0", f"own.{part}"): value.clone() for name, value in state.items()
    }


@pytest.mark.parametrize(
    ("stage", "world", "by_client"), [("zero0", 2, True), ("zero1", 4, False), ("zero3-free", 4, True)]
)
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
    part, fp16 = dist.get_rank() % 2, {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = start(Parted([part]), stage, optimizer=SGD, gradient_clipping=0.5, fp16=fp16)
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


@pytest.mark.parametrize(
    ("stage", "world", "part", "name"), [("zero0", 2, 1, "own.0"), ("zero1", 4, 1, "common.weight")]
)
def test_what_one_part_overflows_all_skip(ranks: Pools, stage: str, world: int, part: int, name: str) -> None:
    for skipped, scale, culprit in ranks(world).run(overflowing, stage, part, name):
        assert (skipped, scale) == (1, 128.0) and culprit == (part, name)
