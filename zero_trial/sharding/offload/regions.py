"""Regions that hold offloaded bytes: host memory, or files on disks
(:mod:`zero_trial.sharding.offload.region_file`); and the ring of buffers through which bytes pass.

    file      region ──read──► buffer ──────────────copy──► where it is used        (CPU rank)
    file      region ──read──► pinned half ──copy──► device half ──copy──► ...      (device)
    memory    region ───────────────────────copy──► device half ──copy──► ...       (device)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zero_trial.errors import StorageError
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.copies import Copier, Copy
from zero_trial.sharding.offload.region_file import BLOCK, RegionFile, Transfer

# elements: pieces are cut at multiples of this, so that cuts are between blocks of the disk for
# every dtype
CUT = BLOCK
MOST = 1 << 22  # elements of a buffer: 16 MiB of fp32; disks reach their best rate with less


class HostRegion:
    """A region without a file: (pinned) host memory, with copies from and to a device."""

    def __init__(self, nbytes: int, copier: Copier) -> None:
        self._copier = copier
        self.end = 0
        self.area = copier.buffer(round_up(nbytes, BLOCK))

    def reserve(self, nbytes: int) -> int:
        offset, self.end = self.end, self.end + round_up(nbytes, BLOCK)
        if self.end > self.area.numel():
            self._copier.settle()
            grown = self._copier.buffer(self.end)
            grown[: self.area.numel()].copy_(self.area)
            self.area = grown
        return offset

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        """Start to fill ``into``; :meth:`Transfer.wait` orders the device's later work after it."""
        return _Ordered(self._copier.copy(self.view(offset, into.nbytes), into))

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        return self._copier.copy(source, self.view(offset, source.nbytes))

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return the bytes from ``offset`` on, for reads and writes."""
        return self.area[offset : offset + nbytes]

    def mapped(self) -> AbstractContextManager[None]:
        self._copier.settle()
        return nullcontext()

    def close(self) -> None:
        self._copier.settle()
        self.area = self.area[:0].clone()


# A range of bytes. Offsets and sizes are bytes; tensors are contiguous.
Region = HostRegion | RegionFile


class _Ordered:
    """A copy to a device: waiting for it makes the device's later work run after it."""

    def __init__(self, copy: Copy) -> None:
        self.done = copy.done
        self.wait = copy.order


class _ThenUp:
    """A read of a file into host memory, followed by a copy to a device. The copy runs after the
    device's work that was submitted before the read, and in parallel to all later work."""

    def __init__(self, reading: Transfer, copier: Copier, source: torch.Tensor, into: torch.Tensor) -> None:
        self._reading = reading
        self._copier = copier
        self._tensors = (source, into)
        self._begun = copier.now()
        self.copy: Copy | None = None

    def done(self) -> bool:
        return self.copy is not None

    def start(self) -> Copy:
        if self.copy is None:
            self._reading.wait()
            self.copy = self._copier.copy(*self._tensors, self._begun)
        return self.copy

    def wait(self) -> None:
        self.start().order()


class Buffer:
    """Memory in front of a region. ``near`` is where the bytes are used. If that is a device,
    ``copier`` copies from and to it, and ``host`` is memory between it and files; None if there are
    no files.

    Waiting for a read into a device's ``near`` makes the device's later work run after it; waiting
    for a write blocks the host.
    """

    def __init__(self, near: torch.Tensor, host: torch.Tensor | None = None, copier: Copier | None = None) -> None:
        self.near = near
        self.host = host
        self._copier = copier
        self._up: _ThenUp | None = None  # reads from ``host``

    def read(self, region: Region, offset: int, low: int, nbytes: int) -> Transfer:
        """Start to fill ``nbytes`` bytes from byte ``low`` on."""
        near = self.near[low : low + nbytes]
        if self._copier is None or isinstance(region, HostRegion):
            return region.read(offset, near)
        host = self._idle_host(low, nbytes)
        self._up = _ThenUp(region.read(offset, host), self._copier, host, near)
        return self._up

    def write(self, region: Region, offset: int, low: int, nbytes: int) -> Transfer:
        """Start to write ``nbytes`` bytes from byte ``low`` on."""
        near = self.near[low : low + nbytes]
        if self._copier is None or isinstance(region, HostRegion):
            return region.write(offset, near)
        host = self._idle_host(low, nbytes)
        self._copier.copy(near, host).wait()
        return region.write(offset, host)

    def _idle_host(self, low: int, nbytes: int) -> torch.Tensor:
        """Return a part of the host half, once the device has read its previous content."""
        if self._up is not None:
            self._up.start().wait()
            self._up = None
        if self.host is None:
            raise StorageError("a buffer between a device and a file has no host memory", where="Buffer")
        return self.host[low : low + nbytes]


class Ring:
    """Buffers that are free, or being written out: they are free once their transfers are done. All
    other buffers are with a caller of :meth:`take`."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._free = deque(buffers)
        self._leaving: deque[tuple[Buffer, Sequence[Transfer]]] = deque()

    def take(self, *, wait: bool = False) -> Buffer | None:
        """Return a free buffer. If none is free, wait for the oldest (``wait``) or return None."""
        while self._leaving:
            buffer, transfers = self._leaving[0]
            if not all(transfer.done() for transfer in transfers) and (self._free or not wait):
                break
            for transfer in transfers:
                transfer.wait()  # which may be interrupted
            self._leaving.popleft()
            self._free.append(buffer)
        return self._free.popleft() if self._free else None

    def give(self, buffer: Buffer, transfers: Sequence[Transfer] = ()) -> None:
        """Take a buffer back; it is free when ``transfers`` are done."""
        if transfers:
            self._leaving.append((buffer, transfers))
        else:
            self._free.append(buffer)

    def drain(self) -> None:
        """Wait until no transfer is in flight."""
        wait_for(transfer for _, transfers in self._leaving for transfer in transfers)
        self._free.extend(buffer for buffer, _ in self._leaving)
        self._leaving.clear()

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that no caller holds."""
        return [*self._free, *(buffer for buffer, _ in self._leaving)]


def wait_for(transfers: Iterable[Transfer]) -> None:
    """Wait for all ``transfers``, even after one fails; raise the first failure."""
    first: StorageError | None = None
    for transfer in transfers:
        try:
            transfer.wait()
        except StorageError as fault:
            first = first or fault
    if first is not None:
        raise first


def buffer_elements(total: int, wanted: int, count: int) -> int:
    """Return the elements of a buffer: at least CUT, else at most ``wanted`` and MOST, and a
    quarter of ``total`` in ``count`` buffers."""
    return max(min(wanted, MOST, total // (4 * count)) // CUT, 1) * CUT


def shard_buffer_bytes(shards: Collection[tuple[int, int]], wanted: int, count: int) -> int:
    """Return the bytes of a buffer for ``shards``, which are (elements, bytes of an element): at
    least CUT elements of each, else at most ``wanted`` elements, the largest shard, and a quarter
    of all bytes in ``count`` buffers."""
    widths = [width for _, width in shards] or [1]
    largest = max((min(wanted, round_up(numel, CUT)) * width for numel, width in shards), default=0)
    quarter = sum(numel * width for numel, width in shards) // (4 * count)
    unit = CUT * min(widths)
    return max(min(largest, quarter) // unit * unit, CUT * max(widths))
