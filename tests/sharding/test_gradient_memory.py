"""Tests for zero_trial/sharding/grad_buffer.py: which memory full gradients take, and when it is whose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.parts import alone
from zero_trial.sharding.grad_buffer import (
    LARGEST_KEPT,
    BufferPool,
    FlatGrads,
    PersistentGrads,
    PooledBuffer,
    PooledGrads,
    ResizedGrads,
    cut,
    gradient_memory,
)
from zero_trial.sharding.layout import lay_out
from zero_trial.sharding.plan import plan_for_stage

CPU = torch.device("cpu")
LAYOUT = lay_out([("a", (3, 5)), ("b", (7,))], 2)


class Comm:
    """Buffers of which some are still read."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.read: set[int] = set()
        self.waited: list[int] = []

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.made.append(numel)
        return torch.zeros(numel, dtype=dtype)

    def has_readers(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.read

    def wait_for_readers(self, tensor: torch.Tensor) -> None:
        self.read.discard(tensor.data_ptr())
        self.waited.append(tensor.data_ptr())


def rooms(most: int = 2) -> tuple[BufferPool, Any]:
    comm = Comm()
    return BufferPool(comm, most), comm  # type: ignore[arg-type]


def test_groups_take_one_room_in_turn() -> None:
    pool, comm = rooms()
    first, second = PooledGrads(LAYOUT, torch.float32, pool), PooledGrads(LAYOUT, torch.float32, pool)
    place = first.borrow()
    assert place.full.numel() == LAYOUT.numel
    assert [tuple(view.shape) for view in place.views] == [(3, 5), (7,)]
    assert sum(part.numel() for part in place.padding) == LAYOUT.numel - 22
    assert first.borrow() is place, "it has it already"
    first.give_back()
    assert first.flat is None
    assert second.borrow().full.data_ptr() == place.full.data_ptr()
    second.give_back()
    assert first.borrow() is place, "the same views in every step"
    assert comm.made == [LAYOUT.numel * 4]


def test_there_are_as_many_rooms_as_gradients_live_at_once() -> None:
    pool, comm = rooms(most=2)
    taken = [pool.take(100) for _ in range(3)]
    assert len(comm.made) == 3, "more than the usual number, rather than none"
    for room in taken:
        pool.give_back(room)
    for _ in range(3):
        pool.take(100)
    assert len(comm.made) == 3


def test_a_room_that_peers_still_read_is_waited_for_only_where_there_are_enough() -> None:
    pool, comm = rooms(most=2)
    first = pool.take(100)
    comm.read.add(first.buffer.data_ptr())
    pool.give_back(first)
    second = pool.take(100)
    assert second is not first and comm.waited == []
    comm.read.add(second.buffer.data_ptr())
    pool.give_back(second)
    assert pool.take(100) is first, "the one given back first"
    assert comm.waited == [first.buffer.data_ptr()]


def test_groups_of_other_sizes_have_other_rooms_and_dtypes_share() -> None:
    pool, _ = rooms(most=4)
    small = pool.take(100)
    pool.give_back(small)
    large = pool.take(201)
    pool.give_back(large)
    assert large is not small
    assert pool.take(50) is small
    assert pool.take(150) is large
    narrow = PooledGrads(LAYOUT, torch.bfloat16, pool).borrow()
    assert narrow.full.dtype == torch.bfloat16 and narrow.full.numel() == LAYOUT.numel


def test_large_rooms_go_when_nobody_uses_them() -> None:
    pool, comm = rooms()
    kept, large = pool.take(100), pool.take(LARGEST_KEPT + 1)
    comm.read.add(large.buffer.data_ptr())
    pool.give_back(large)
    assert len(pool.buffers()) == 2, "it is being read"
    comm.read.clear()
    pool.give_back(kept)
    assert [buffer.numel() for buffer in pool.buffers()] == [100]


def test_places_of_a_room_are_made_once() -> None:
    room, made = PooledBuffer(torch.zeros(LAYOUT.numel)), []

    def make(buffer: torch.Tensor) -> FlatGrads:
        made.append(buffer)
        return cut(buffer, LAYOUT)

    first = room.flat("a", make)
    assert room.flat("b", make) is not first
    assert room.flat("a", make) is first
    assert len(made) == 2


def test_a_kept_buffer_waits_for_its_readers_before_it_is_written() -> None:
    comm = Comm()
    kept = PersistentGrads(LAYOUT, torch.float32, CPU, comm)  # type: ignore[arg-type]
    comm.read.add(kept.flat.full.data_ptr())
    place = kept.borrow()
    assert comm.waited == [place.full.data_ptr()]
    kept.give_back()
    assert kept.flat is place and place.full.untyped_storage().nbytes() == LAYOUT.numel * 4


def test_a_revived_buffer_has_no_memory_in_between() -> None:
    revived = ResizedGrads(LAYOUT, torch.float32, CPU)
    assert revived.flat.full.untyped_storage().nbytes() == 0
    revived.borrow().full.fill_(1.0)
    assert revived.flat.views[0].sum() == 15
    revived.give_back()
    assert revived.flat.full.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("stage", "shared", "kind"),
    [(0, True, PersistentGrads), (1, False, PersistentGrads), (2, True, PooledGrads), (3, False, ResizedGrads)],
)
def test_the_kind_follows_from_the_lifetime_and_the_rooms(stage: int, shared: bool, kind: type) -> None:
    pool = rooms()[0] if shared else None
    assert type(gradient_memory(LAYOUT, torch.float32, CPU, plan_for_stage(stage), alone(), pool)) is kind
