"""Tests for zero_trial/sharding/offload/regions.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.device import device
from tests.support.pool import Pools
from zero_trial.errors import StorageError
from zero_trial.sharding.offload.copies import Copier
from zero_trial.sharding.offload.region_file import BLOCK, DiskFailure
from zero_trial.sharding.offload.regions import (
    CUT,
    MOST,
    Buffer,
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
    return [Buffer(torch.zeros(8, dtype=torch.uint8)) for _ in range(count)]


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
    failure.record([Path("/disk"), Path("/more")], OSError("one"))
    failure.record([Path("/other")], OSError("two"))
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            failure.require_none()
        assert str(error.value).startswith("/disk, /more: the disk has failed, and offloaded state is lost: got one")
        assert "go on from the last checkpoint in a new engine" in str(error.value)


def grown() -> list[bool]:
    """Whether host memory of a device keeps its bytes where it grows."""
    here = device.use()
    region = HostRegion(BLOCK, Copier(torch.device("standin"), pinned=True))
    values = [torch.randn(count) for count in (3 * BLOCK, 7, BLOCK)]
    offsets = [region.reserve(value.nbytes) for value in values]
    for offset, value in zip(offsets, values, strict=True):
        source = value.view(torch.uint8).to("standin")
        region.write(offset, source).wait()
    same = [offsets == [0, 12 * BLOCK, 13 * BLOCK], region.reserve(100 * BLOCK) == 17 * BLOCK]
    for offset, value in zip(offsets, values, strict=True):
        found = torch.empty(value.nbytes, dtype=torch.uint8, device="standin")
        region.read(offset, found).wait()
        same.append(torch.equal(found.cpu().view(torch.float32), value))
    region.close()
    here.reset()
    return same


def test_host_memory_grows_and_keeps_its_bytes(devices: Pools) -> None:
    assert devices(1).run(grown) == [[True] * 5]


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
