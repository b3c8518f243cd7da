"""Tests for zero_trial/sharding/offload/device_space.py, with a copier and a file that are as late
as they may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.late_swap_file import LateSwapFile
from tests.sharding.parts import make_group, parameters
from zero_trial.errors import StorageError
from zero_trial.sharding.offload.copies import BlockingCopier
from zero_trial.sharding.offload.device_space import DeviceSpace, HostMemory
from zero_trial.sharding.offload.nvme_params import ParamSwapper, SwappedShard
from zero_trial.sharding.offload.swap_space import BLOCK
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Home

CPU = torch.device("cpu")


class LateCopy:
    """Done when it is ordered or waited for, and not before."""

    def __init__(self, source: torch.Tensor, into: torch.Tensor) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (source, into)
        into.fill_(255 if into.dtype == torch.uint8 else float("nan"))

    def order(self) -> None:
        if self._tensors is not None:
            source, into = self._tensors
            into.copy_(source)
            self._tensors = None

    wait = order


class LateCopier(BlockingCopier):
    def __init__(self) -> None:
        self.copies: list[LateCopy] = []

    def beside(self, source: torch.Tensor, into: torch.Tensor, after: torch.Event | None = None) -> LateCopy:
        self.copies.append(LateCopy(source, into))
        return self.copies[-1]

    def settle(self) -> None:
        for copy in self.copies:
            copy.wait()


def space_over(kind: str, count: int = 2) -> tuple[DeviceSpace, Any]:
    copier = LateCopier()
    host: Any = HostMemory(BLOCK, copier) if kind == "memory" else LateSwapFile()
    kept = HostMemory(6 * BLOCK, copier) if kind == "both" else None
    return DeviceSpace(host, copier, CPU, count=count if kind != "memory" else 0, nbytes=BLOCK, kept=kept), host


def noise(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ["memory", "file", "both"])
def test_what_was_written_is_read_in_any_order(kind: str, count: int) -> None:
    """More than the pinned buffers hold, with several transfers under way; memory grows."""
    space, _ = space_over(kind, count)
    values = [noise(numel) for numel in (3 * BLOCK, 7, BLOCK // 4, 5000)]
    offsets = [space.reserve(4 * value.numel()) for value in values]
    writes = [space.write(offset, value.clone()) for offset, value in zip(offsets, values, strict=True)]
    for write in writes:
        write.wait()
    found = [space.buffer(4 * value.numel()).view(torch.float32) for value in values]
    reads = [space.read(offset, into) for offset, into in zip(offsets, found, strict=True)]
    for read in reversed(reads):
        read.wait()
        assert read.done()
    assert all(map(torch.equal, found, values))
    assert space.bytes_read == space.bytes_written == 4 * sum(value.numel() for value in values)
    assert [buffer.numel() for buffer in space.pinned] == [BLOCK] * (count if kind != "memory" else 0)


def test_what_fits_is_in_memory_and_the_rest_in_the_file() -> None:
    """By whole reservations; the file never has it, and a mapping leaves it where it is."""
    space, file = space_over("both")
    sizes = (3 * BLOCK, 4 * BLOCK, 2 * BLOCK, BLOCK, BLOCK)
    offsets = [space.reserve(size) for size in sizes]
    values = [noise(size // 4) for size in sizes]
    for offset, value in zip(offsets, values, strict=True):
        space.write(offset, value.clone()).wait()
    in_file = [bool(file._area[offset : offset + size].any()) for offset, size in zip(offsets, sizes, strict=True)]
    assert in_file == [False, True, False, False, True] and space.kept_bytes == 6 * BLOCK
    part = torch.zeros(BLOCK // 4)
    space.read(offsets[2] + BLOCK, part).wait()
    assert torch.equal(part, values[2][BLOCK // 4 :])
    before = file._area.clone()
    with space.mapped() as area:
        for offset, value, on_disk in zip(offsets, values, in_file, strict=True):
            memory = space.in_memory(offset, 4 * value.numel())
            assert (memory is None) == on_disk
            there = area[offset : offset + 4 * value.numel()] if memory is None else memory
            assert torch.equal(there.view(torch.float32), value)
        for place in (offsets[2], offsets[3]):
            part = space.in_memory(place, BLOCK * (2 if place == offsets[2] else 1))
            assert part is not None
            part.fill_(7)
        assert torch.equal(file._area, before), "nothing was copied into it"
        area[offsets[4] : offsets[4] + BLOCK] = 7
    found = torch.zeros(4 * BLOCK, dtype=torch.uint8)
    for low, place in zip((0, 2, 3), offsets[2:], strict=True):
        space.read(place, found[low * BLOCK : (low + (2, 1, 1)[(0, 2, 3).index(low)]) * BLOCK]).wait()
    assert (found == 7).all()


@pytest.mark.parametrize("kind", ["memory", "file", "both"])
def test_the_host_sees_what_a_device_wrote_and_the_reverse(kind: str) -> None:
    space, _ = space_over(kind)
    value, offset = noise(2000), space.reserve(8000)
    write = space.write(offset, value)
    if kind == "file":  # its writer waits before the host's side reads, as for any file
        write.wait()
    here = torch.zeros(2000)
    space.on_host.read(offset, here).wait()
    assert torch.equal(here, value)
    space.on_host.write(offset, -value).wait()
    there = torch.zeros(2000)
    space.read(offset, there).wait()
    assert torch.equal(there, -value)
    with space.mapped() as area:
        memory = space.on_host.in_memory(offset, 8000)
        assert (memory is None) == (kind == "file")
        there = area[offset : offset + 8000] if memory is None else memory
        assert torch.equal(there.view(torch.float32), -value)


class Disk(LateSwapFile):
    """A file in memory that fails while ``fails``."""

    fails = False

    def read(self, offset: int, into: torch.Tensor) -> Any:
        return self._of(super().read(offset, into))

    def write(self, offset: int, source: torch.Tensor) -> Any:
        return self._of(super().write(offset, source))

    def _of(self, transfer: Any) -> Any:
        transfer.wait()
        return Broken() if self.fails else transfer


class Broken:
    """A transfer that has failed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise StorageError("broken", where="/disk")


@pytest.mark.parametrize("act", ["read", "write"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_buffer_whose_transfer_failed_is_not_used_again(act: str, count: int) -> None:
    disk = Disk()
    space = DeviceSpace(disk, BlockingCopier(), CPU, count=count, nbytes=BLOCK)
    values, offset = noise(4 * BLOCK), space.reserve(16 * BLOCK)
    disk.fails = True
    # more than the buffers hold: the failure is found where one is needed again
    with pytest.raises(StorageError, match="broken"):
        getattr(space, act)(offset, values)
    disk.fails = False
    for _ in range(3):
        with pytest.raises(StorageError, match="broken"):
            space.write(offset, values)


@pytest.mark.parametrize("act", ["read", "write"])
def test_what_a_buffer_lost_is_lost_for_all(act: str) -> None:
    """A transfer that fails while its buffer is taken for another: neither a gather nor a
    checkpoint goes on from stale bytes."""
    disk = Disk()
    space = DeviceSpace(disk, BlockingCopier(), CPU, count=1, nbytes=BLOCK)
    swapper = ParamSwapper(space, most=4 * BLOCK, count=1)
    group = make_group(parameters([(4 * BLOCK,)]), stage=3, dtype=torch.bfloat16, home=Home.NVME)
    swapper.swap_out(group)
    values = torch.ones_like(group.full)
    disk.fails = True
    with pytest.raises(StorageError, match="broken"):
        if act == "read":
            group.unshard()
        else:
            swapper.store(shard_of(group), values[: group.layout.shard_numel])
    disk.fails = False
    with pytest.raises(StorageError, match="the disk has failed"), swapper.lent():
        pass
    with pytest.raises(StorageError, match="the disk has failed"):
        group.unshard()


def shard_of(group: ParamGroup) -> SwappedShard:
    assert isinstance(group.offloaded, SwappedShard)
    return group.offloaded


def test_nothing_is_there_before_the_wait() -> None:
    space, host = space_over("memory")
    offset = space.reserve(4000)
    host.area.zero_()
    into = torch.ones(1000)
    read = space.read(offset, into)
    assert into.isnan().all() and not read.done()
    read.wait()
    assert (into == 0).all()
    space.close()
    assert host.area.numel() == 0
