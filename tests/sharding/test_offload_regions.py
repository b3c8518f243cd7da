"""Tests for zero_trial/sharding/offload/regions.py."""

from __future__ import annotations

import pytest
import torch

from zero_trial.errors import StorageError
from zero_trial.sharding.offload.copies import BlockingCopier
from zero_trial.sharding.offload.regions import (
    BLOCK,
    CUT,
    MOST,
    Buffer,
    DiskFailure,
    HostRegion,
    Ring,
    buffer_elements,
    wait_for,
)


class Transfer:
    """A transfer that is over when it was waited for."""

    def __init__(self, fault: str | None = None, *, over: bool = False) -> None:
        self.fault = fault
        self.over = over

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True
        if self.fault is not None:
            raise StorageError("could not be written", where="/disk", got=self.fault)


def buffers(count: int) -> list[Buffer]:
    return [Buffer(torch.zeros(8, dtype=torch.uint8), None, None) for _ in range(count)]


def test_a_ring_waits_only_if_it_must() -> None:
    one, two = made = buffers(2)
    ring, slow, fast = Ring(made), Transfer(), Transfer(over=True)
    assert ring.take() is one and ring.take() is two and ring.take() is None
    ring.give(one, [slow])
    assert ring.take() is None and not slow.over
    ring.give(two)
    assert ring.take(wait=True) is two and not slow.over, "one is free"
    ring.give(two, [fast])
    assert ring.take(wait=True) is one and slow.over
    assert ring.take() is two, "its transfer was over"
    ring.give(one, [Transfer()])
    ring.give(two, [last := Transfer()])
    ring.drain()
    assert last.over and ring.buffers == [one, two]


def test_a_buffer_whose_transfer_failed_is_not_used_again() -> None:
    ring = Ring(buffers(1))
    buffer = ring.take()
    assert buffer is not None
    ring.give(buffer, [Transfer("one")])
    for _ in range(3):
        with pytest.raises(StorageError, match="got one"):
            ring.take(wait=True)


def test_all_are_waited_for() -> None:
    """Also those behind one that failed: their memory is free afterwards."""
    last = Transfer()
    with pytest.raises(StorageError, match="got one"):
        wait_for([Transfer("one"), Transfer("two"), last])
    assert last.over


def test_the_first_failure_is_recorded() -> None:
    failure = DiskFailure()
    failure.require_none()
    failure.record(StorageError("lost", where="/disk", got="one"))
    failure.record(StorageError("lost", where="/other", got="two"))
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            failure.require_none()
        assert str(error.value).startswith("/disk: the disk has failed, and offloaded state is lost: got one")
        assert "go on from the last checkpoint in a new engine" in str(error.value)


def test_host_memory_grows_and_keeps_its_bytes() -> None:
    region = HostRegion(BLOCK, BlockingCopier())
    values = [torch.randn(count) for count in (3 * BLOCK, 7, BLOCK)]
    offsets = [region.reserve(value.nbytes) for value in values]
    assert offsets == [0, 12 * BLOCK, 13 * BLOCK]
    for offset, value in zip(offsets, values, strict=True):
        region.write(offset, value).wait()
    assert region.reserve(100 * BLOCK) == 17 * BLOCK
    for offset, value in zip(offsets, values, strict=True):
        found = torch.empty_like(value)
        region.read(offset, found).wait()
        assert torch.equal(found, value)
    with region.mapped() as area:
        area[: 4 * 7] = 0
    assert (region.in_memory(0, 28) == 0).all()
    region.close()
    assert region.area.numel() == 0


@pytest.mark.parametrize(
    ("total", "sub_group", "count", "elements"),
    [
        (1 << 30, 10**9, 4, MOST),
        (1 << 30, 100_000, 4, 24 * CUT),
        (1 << 20, 10**9, 2, 1 << 17),
        (1 << 20, 10**9, 4, 1 << 16),
        (1000, 10**9, 4, CUT),
        (1000, 1, 1, CUT),
    ],
)
def test_buffers_hold_a_quarter_at_most(total: int, sub_group: int, count: int, elements: int) -> None:
    assert buffer_elements(total, sub_group, count) == elements


def test_buffers_of_parameters_hold_whole_shards() -> None:
    assert buffer_elements(1 << 30, 6 * MOST, 4, 6 * MOST) == 6 * MOST
    assert buffer_elements(24 * MOST, 6 * MOST, 4, 6 * MOST) == 24 * MOST // 16
