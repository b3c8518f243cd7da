"""Gradients in another dtype on the wire are cast once, straight to where peers read them, and nothing is copied out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_trial
from tests.sharding.parts import alone
from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.comm.shm.probe import _MEMORIES
from zero_trial.sharding.reduce import GradReducer


def test_where_nobody_reads_in_place_a_cast_is_a_tensor() -> None:
    reducer = GradReducer([], alone(), alone())
    full = torch.tensor([1.0, 1 + 2**-9])
    cast, room = reducer._cast(full, torch.bfloat16)
    assert cast.tolist() == [1.0, 1.0] and cast.dtype is torch.bfloat16 and room is None


def rooms_in_turn() -> None:
    mesh = build_mesh(MeshShape(shard=dist.get_world_size()))
    comm, reducer = mesh.shard, GradReducer([], mesh.shard, mesh.replica, in_flight=0)
    full = torch.full((100,), 1.0 + comm.index)
    first, one = reducer._cast(full, torch.bfloat16)
    second, other = reducer._cast(full, torch.bfloat16)
    assert one is not other and one is not None
    reducer._casts.give_back(one)
    again, same = reducer._cast(full[:90], torch.bfloat16)
    assert same is one
    assert again.data_ptr() == first.data_ptr() != second.data_ptr()
    out = torch.empty(45, dtype=torch.bfloat16)
    before = _MEMORIES[dist.group.WORLD].written
    comm.reduce_scatter(again, out, "gradients").wait()
    assert out.tolist() == [3.0] * 45
    assert _MEMORIES[dist.group.WORLD].written == before


def test_rooms_are_taken_in_turn_and_read_in_place(ranks: Pools) -> None:
    ranks(2).run(rooms_in_turn)


def train(stage: int, wire: str, transport: str) -> tuple[int, list[float]]:
    """Bytes copied out in two steps after a first one, and the weights."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "communication_data_type": wire,
        "comm_transport": transport,
        "prescale_gradients": True,
    }
    engine, *_ = zero_trial.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    memory = _MEMORIES.get(dist.group.WORLD)
    before = 0
    for step in range(3):
        loss = engine(torch.randn(2, 64, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        if step == 0 and memory is not None:
            before = memory.written
    written = memory.written - before if memory is not None else 0
    with torch.no_grad():
        probe = engine(torch.ones(1, 64))
    return written, probe.flatten().tolist()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_copies_no_gradient_out(ranks: Pools, stage: int) -> None:
    ours = ranks(2).run(train, stage, "bf16", "auto")
    by_messages = ranks(2).run(train, stage, "bf16", "gloo")
    assert [written for written, _ in ours] == [0, 0]
    assert ours[0][1] == ours[1][1] == by_messages[0][1], "the same bits on any way"
    assert ours[0][1] != ranks(2).run(train, stage, "fp32", "auto")[0][1], "the wire's dtype counts"
