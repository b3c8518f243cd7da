"""Regions, in which offloaded bytes live: host memory, or files on disks
(:mod:`zero_trial.sharding.offload.region_file`); and the ring of buffers through which they pass.

    file      region ──read──► buffer ──────────────copy──► where it is used        (CPU rank)
    file      region ──read──► pinned half ──copy──► device half ──copy──► ...      (device)
    memory    region ───────────────────────copy──► device half ──copy──► ...       (device)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from zero_trial.errors import StorageError
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.copies import DONE, Copy, HostCopier

# O_DIRECT takes offsets, lengths and addresses that are multiples of it, on every disk we know of
BLOCK = 4096
# elements: pieces are cut at multiples of it, so that for every dtype cuts are between blocks of
# the disk
CUT = BLOCK
MOST = 1 << 22  # elements of a buffer: 16 MiB of fp32; disks reach their best rate with less


class Transfer(Protocol):
    """A transfer in flight. The tensor must be neither written nor read until :meth:`wait` has
    returned."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Wait until all of it is transferred. Raises StorageError if the disk failed, at every
        call: several may wait for one transfer."""
        ...


class DiskFailure:
    """The first failure of any disk of this rank, after which no region is read or written again:
    half a step in one of its files is half a step in all. Regions record and check it."""

    def __init__(self) -> None:
        self.first: StorageError | None = None

    def record(self, fault: StorageError) -> StorageError:
        self.first = self.first or fault
        return fault

    def require_none(self) -> None:
        """Raise StorageError after a failure: a checkpoint of half a step, or a step from it, would
        be silently wrong."""
        if self.first is not None:
            raise StorageError(
                "the disk has failed, and offloaded state is lost",
                where=self.first.where,
                got=self.first.got,
                fix="Fix the disk or name another one in nvme_path, and go on from the last checkpoint in a new engine.",
            ) from self.first


class Region(Protocol):
    """A range of bytes. Offsets and sizes are bytes; tensors are contiguous."""

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes``, rounded up to what can be transferred, and return their offset."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory that transfers reach best: (nbytes,) uint8."""
        ...

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        """Start to fill ``into`` with the bytes from ``offset`` on."""
        ...

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        """Start to write ``source`` at ``offset``."""
        ...

    def mapped(self) -> AbstractContextManager[torch.Tensor]:
        """Map all of it as (size,) uint8, to read and to write inside the block; no transfer may be
        in flight."""
        ...

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the bytes from ``offset`` on if the region is host memory; else None."""
        ...

    def close(self) -> None:
        """Free the space. Transfers must be waited for before."""
        ...


class HostRegion:
    """A region without a file: (pinned) host memory that a device copies from and to."""

    def __init__(self, nbytes: int, copier: HostCopier) -> None:
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

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self._copier.buffer(nbytes)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        into.view(torch.uint8).copy_(self.in_memory(offset, into.nbytes))
        return DONE

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        self.in_memory(offset, source.nbytes).copy_(source.view(torch.uint8))
        return DONE

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        self._copier.settle()
        yield self.area

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.area[offset : offset + nbytes]

    def close(self) -> None:
        self._copier.settle()
        self.area = self.area[:0].clone()


class _ThenUp:
    """A read of a file into host memory, after which a device copies it. The copy comes after the
    work that the device had when the read began, and runs next to all later work."""

    def __init__(self, reading: Transfer, copier: HostCopier, source: torch.Tensor, into: torch.Tensor) -> None:
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
            self.copy = self._copier.beside(*self._tensors, self._begun)
        return self.copy

    def wait(self) -> None:
        self.start().order()


class _Ordered:
    """A copy to a device: who waits for it orders the device's later work after it."""

    def __init__(self, copy: Copy) -> None:
        self.done = copy.done
        self.wait = copy.order


class Buffer:
    """Memory in front of a region. ``near`` is where the bytes are used: memory of a device, and
    then ``_host`` is pinned memory between it and files (None if there are no files); or both are
    the same host memory.

    Waiting for a read into ``near`` of a device orders the device's later work after it; waiting
    for a write waits on the host.
    """

    def __init__(self, near: torch.Tensor, host: torch.Tensor | None, copier: HostCopier | None) -> None:
        self.near = near
        self._host = host
        self._copier = copier
        self._up: _ThenUp | None = None  # reads from ``_host``

    def read(self, region: Region, offset: int, nbytes: int) -> Transfer:
        """Start to fill the first ``nbytes`` bytes."""
        near, copier = self.near[:nbytes], self._copier
        if copier is None:
            return region.read(offset, near)
        if (memory := region.in_memory(offset, nbytes)) is not None:
            return _Ordered(copier.beside(memory, near))
        host = self._idle_host()[:nbytes]
        self._up = _ThenUp(region.read(offset, host), copier, host, near)
        return self._up

    def write(self, region: Region, offset: int, low: int, nbytes: int) -> Transfer:
        """Start to write ``nbytes`` bytes from byte ``low`` on."""
        near, copier = self.near[low : low + nbytes], self._copier
        if copier is None:
            return region.write(offset, near)
        if (memory := region.in_memory(offset, nbytes)) is not None:
            return copier.beside(near, memory)
        host = self._idle_host()[low : low + nbytes]
        copier.beside(near, host).wait()
        return region.write(offset, host)

    def _idle_host(self) -> torch.Tensor:
        """Return the host half, after the device has read what was there."""
        if self._up is not None:
            self._up.start().wait()
            self._up = None
        if self._host is None:
            raise StorageError("a buffer between a device and a file has no host memory", where="Buffer")
        return self._host

    @property
    def memory(self) -> list[torch.Tensor]:
        return [self.near] if self._host is None or self._host is self.near else [self.near, self._host]


class Ring:
    """Buffers that are free, or that leave: transfers from them are in flight, and they are free
    afterwards. Everything else is with a caller of :meth:`take`."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._free = deque(buffers)
        self._leaving: deque[tuple[Buffer, Sequence[Transfer]]] = deque()

    def take(self, *, wait: bool = False) -> Buffer | None:
        """Return a free buffer, or None. ``wait``: wait for the one that left first if there is no
        other."""
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
        """Take a buffer back, which is free when ``transfers`` are over."""
        if transfers:
            self._leaving.append((buffer, transfers))
        else:
            self._free.append(buffer)

    def drain(self) -> None:
        """Wait until nothing leaves."""
        wait_for(transfer for _, transfers in self._leaving for transfer in transfers)
        self._free.extend(buffer for buffer, _ in self._leaving)
        self._leaving.clear()

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that are with no caller."""
        return [*self._free, *(buffer for buffer, _ in self._leaving)]


def wait_for(transfers: Iterable[Transfer]) -> None:
    """Wait for all of them, also behind one that failed; raise the first failure."""
    first: StorageError | None = None
    for transfer in transfers:
        try:
            transfer.wait()
        except StorageError as fault:
            first = first or fault
    if first is not None:
        raise first


def buffer_elements(total: int, wanted: int, count: int, most: int = MOST) -> int:
    """Return the elements of a buffer: at least CUT, else at most ``wanted`` and ``most``, and a
    quarter of ``total`` in ``count`` buffers."""
    return max(min(wanted, most, total // (4 * count)) // CUT, 1) * CUT
