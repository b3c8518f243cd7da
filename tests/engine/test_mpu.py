"""The questions that Megatron-style code asks of an engine."""

from __future__ import annotations

import pytest

from tests.support.dense import Case, build_engine
from tests.support.models import TinyLM
from tests.support.pool import Pools


def answers(stage: int, mesh: dict[str, int]) -> tuple[int, ...]:
    config = {"mesh": mesh} if mesh else {}
    engine = build_engine(Case(TinyLM, lambda model, turn: model, config=config), {"stage": stage})
    mpu = engine.mpu
    assert mpu.get_global_rank() == engine.global_rank == engine.mesh.rank
    assert engine.dp_world_size == mpu.get_data_parallel_world_size()
    assert engine.data_parallel_group is mpu.get_data_parallel_group()
    assert mpu.get_slice_parallel_world_size() == mpu.get_model_parallel_world_size() == engine.mp_world_size
    return (
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_world_size(),
        mpu.get_pipe_parallel_rank(),
        mpu.get_pipe_parallel_world_size(),
        mpu.get_model_parallel_rank(),
        mpu.get_slice_parallel_rank(),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_has_data_of_its_own(ranks: Pools, stage: int) -> None:
    assert ranks(2).run(answers, stage, {}) == [(0, 2, 0, 1, 0, 0), (1, 2, 0, 1, 0, 0)]


def test_in_hybrid_sharding_too(ranks: Pools) -> None:
    """Shard groups are neighbours; the data-parallel rank counts over all of them."""
    found = ranks(4).run(answers, 2, {"shard": 2, "replica": 2})
    assert [row[:2] for row in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]
