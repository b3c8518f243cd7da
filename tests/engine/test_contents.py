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
from zero_trial.engine.loading import CheckpointNames
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


def build(stage: str, by_client: bool) -> tuple[zero_trial.Engine, int]:
    mpu = ClientMpu() if by_client else None
    part = dist.get_rank() % 2
    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "zero_optimization": STAGES[stage]}
    engine, *_ = zero_trial.initialize(
        model=Columns(part), config=config if by_client else config | {"mesh": {"model": 2}}, mpu=mpu
    )
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


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.parametrize(("size", "stage"), [(2, "zero0"), (4, "zero1"), (4, "zero3-free")])
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
        "engine.save_16bit_model: no rank has the whole model: it is parallel itself: got 2 parts. Use engine.save_checkpoint"
    )
    assert list(tmp_path.iterdir()) == []


def test_parts_are_not_joined_by_accident(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(saved_part, str(tmp_path), "zero0")
    engine, *_ = zero_trial.initialize(model=Columns(0), config={"train_batch_size": 4, "optimizer": ADAMW})
    with pytest.raises(
        CheckpointError, match=r"another number of parallel parts: got 2, expected 1\. Start with mesh\.model: 2"
    ):
        engine.load_checkpoint(str(tmp_path))


def test_names() -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
    names = CheckpointNames(engine)
    assert (names.param("w"), names.state("m", "w"), names.buffer("b")) == ("param/w", "state/m/w", "buffer/b")
    assert names.twins is engine.mesh.world and names.aliases() == {} and names.buffers() == []


def test_the_dtypes_that_masters_do_not_show() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2).double())
    config = {"train_batch_size": 1, "optimizer": ADAMW}
    engine, *_ = zero_trial.initialize(model=module, config=config)
    kinds = {"1.weight": "bfloat16", "1.bias": "bfloat16", "2.weight": "float64", "2.bias": "float64"}
    assert CheckpointNames(engine).facts(1)["dtypes"] == kinds
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=config | {"bf16": {"enabled": True}})
    assert CheckpointNames(engine).facts(1)["dtypes"] == {"weight": "bfloat16", "bias": "bfloat16"}
