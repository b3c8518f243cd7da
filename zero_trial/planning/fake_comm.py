"""A mesh of ranks that are not there: collectives that hold the memory of real ones, and move
nothing.

What a collective of n elements on N ranks holds until its result is there, by how the ranks
exchange:

    SHARED    ranks of one host      nothing where the source is a buffer that peers read in place;
                                     else n (N-1)/N (reduce-scatter) or n/N (all-gather) in segments
                                     that peers read; segments stay for the next payload
    DIRECT    CPU ranks over gloo    n (N-1)/N received contributions (reduce-scatter); small
                                     payloads go this way on one host too
    NATIVE    NCCL                   nothing that is a tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape
from zero_trial.comm.backends import Counts, Transport
from zero_trial.comm.control import ControlChannel
from zero_trial.comm.mesh import AXES
from zero_trial.comm.shm.segments import HEADER, SMALLEST, capacity_for
from zero_trial.comm.shm.transport import WORTH_BYTES
from zero_trial.comm.waits import Finish, Heartbeat, Received, Watchdog, Works
from zero_trial.ds_config.keys_zero import AioSection
from zero_trial.engine.offload_config import OffloadBackends
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.copies import BlockingCopier
from zero_trial.sharding.offload.swap_space import BLOCK, OVER, Transfer


class Exchange(Enum):
    """How the ranks of an axis exchange tensors."""

    SHARED = "shared memory"
    DIRECT = "gloo"
    NATIVE = "nccl"


@dataclass
class _Segment:
    capacity: int
    used: bool = False


@dataclass
class Segments:
    """The shared segments that this rank would own, by the rule of
    :class:`zero_trial.comm.shm.segments.SharedMemory`, and its files on NVMe.

    Peers are taken to read as fast as this rank does; a slower one may cost another segment.
    """

    made: list[_Segment] = field(default_factory=list)
    files: list[_FakeSwapFile] = field(default_factory=list)
    _homes: WeakSet[Any] = field(default_factory=WeakSet)  # storages that peers read in place

    @property
    def total(self) -> int:
        """Return bytes."""
        return sum(HEADER + segment.capacity for segment in self.made)

    @property
    def disk(self) -> int:
        """Return the bytes of this rank's files for offloaded state."""
        return sum(file.end for file in self.files)

    @property
    def backends(self) -> OffloadBackends:
        """Return what offloads to files that count here."""
        return replace(FAKE_SWAP, swap_file=self._open)

    def _open(self, folders: Sequence[Path], nbytes: int, aio: AioSection, where: str) -> _FakeSwapFile:
        self.files.append(_FakeSwapFile())
        return self.files[-1]

    def add_shared(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` lives where peers read it in place."""
        self._homes.add(tensor.untyped_storage())

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is part of one that lives so."""
        return tensor.untyped_storage() in self._homes

    def acquire(self, nbytes: int) -> _Segment:
        found = next((s for s in self.made if not s.used and nbytes <= s.capacity <= max(4 * nbytes, SMALLEST)), None)
        if found is None:
            found = _Segment(capacity_for(nbytes))
            self.made.append(found)
        found.used = True
        return found


class _FakeTransport(Transport):
    """One axis as its first rank sees it.

    Nothing is sent. What would arrive from the others is zeros; a sum over all stays what this rank
    put in.
    """

    def __init__(self, size: int, exchange: Exchange, segments: Segments) -> None:
        self.name = exchange.value
        self._size = size
        self._exchange = exchange
        self._segments = segments

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        own = full.view(self._size, -1)[0]
        parts: dict[int, torch.Tensor] = {}
        segment = None
        if self._shares(full):
            if not self._segments.has(full):
                segment = self._segments.acquire(own.nbytes * (self._size - 1))
        elif self._exchange is not Exchange.NATIVE:
            parts = {peer: torch.zeros_like(own) for peer in range(1, self._size)}

        def add() -> Received:
            out.copy_(own)
            return Received(parts, lambda: _free(segment))

        return [], add

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, *, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        parts = full.view(self._size, -1)
        parts[0].copy_(shard)
        if not again:
            parts[1:].zero_()
        copied_out = self._shares(full) and not self._segments.has(shard)
        segment = self._segments.acquire(shard.nbytes) if copied_out else None
        return [], lambda: _free(segment)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, counts: Counts, tag: int) -> tuple[Works, Finish]:
        received.zero_()
        copied_out = self._shares(sent) and not self._segments.has(sent)
        segment = self._segments.acquire(sent.nbytes) if copied_out else None
        return [], lambda: _free(segment)

    def buffer(self, numel: int, dtype: torch.dtype, *, keep: bool = False) -> torch.Tensor:
        made = super().buffer(numel, dtype, keep=keep)
        if self.reads_in_place:
            self._segments.add_shared(made)
        return made

    @property
    def reads_in_place(self) -> bool:
        return self._size > 1 and self._exchange is Exchange.SHARED

    def _shares(self, full: torch.Tensor) -> bool:
        return self._exchange is Exchange.SHARED and full.nbytes >= WORTH_BYTES


class _FakeControl(ControlChannel):
    """Control values of ranks that are not there: every other rank's are this one's."""

    def all_reduce(self, values: torch.Tensor, label: str, op: str) -> None:
        """Leave ``values`` as they are, but for their sum over all ranks."""
        if op == "sum":
            values *= self._size

    def broadcast(self, raw: torch.Tensor, label: str, source: int) -> None:
        """Leave ``raw`` as it is."""

    def gather_row(self, row: list[int], label: str, index: int) -> list[list[int]]:
        return [row] * self._size

    def gather_json(self, value: Any, label: str, index: int) -> list[Any]:
        return [value] * self._size


def fake_mesh(shape: MeshShape, exchange: Exchange = Exchange.SHARED, segments: Segments | None = None) -> Mesh:
    """Rank 0's place in ``shape``; no process group is needed, and none is used.

    ``segments`` notes what sharing would cost.
    """
    counters, heartbeat = CommCounters(), Heartbeat(None, 0, 1)
    pool = segments if segments is not None else Segments()

    def axis(name: str, size: int) -> AxisComm:
        ranks = tuple(range(size))
        control = _FakeControl(name, None, Watchdog(heartbeat, ranks, 0.0), torch.device("cpu"))
        transport = _FakeTransport(size, exchange, pool)
        return AxisComm(name, ranks, 0, None, counters, heartbeat, 0.0, transport=transport, control=control)

    sizes = dict(zip(AXES, shape.sizes, strict=True))
    sizes |= {"data": shape.data_parallel_size, "world": math.prod(shape.sizes)}
    axes = {name: axis(name, size) for name, size in sizes.items()}
    return Mesh(shape, 0, axes, counters, heartbeat)


def _free(segment: _Segment | None) -> None:
    if segment is not None:
        segment.used = False


# --- offloaded state: buffers in memory, as the run has them, and no disk ---


class _FakeSwapFile:
    """Transfers move nothing and are over at once: what is read is what the buffer held."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self.end = 0

    def reserve(self, nbytes: int) -> int:
        offset, self.end = self.end, self.end + round_up(nbytes, BLOCK)
        return offset

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        self.bytes_read += into.nbytes
        return OVER

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        self.bytes_written += source.nbytes
        return OVER

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """Yield a tensor of the file's size with undefined content; unused pages are free."""
        yield torch.empty(self.end, dtype=torch.uint8)

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


# The device's copies move nothing that has values, and at once.
FAKE_SWAP = OffloadBackends(
    lambda folders, nbytes, aio, where: _FakeSwapFile(), lambda device, pinned: BlockingCopier()
)


class _MemoryFile(_FakeSwapFile):
    """A file in memory: what is read is what was written."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._content = torch.zeros(nbytes, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> int:
        offset = super().reserve(nbytes)
        if self.end > len(self._content):
            more = torch.zeros(max(self.end, 2 * len(self._content)) - len(self._content), dtype=torch.uint8)
            self._content = torch.cat([self._content, more])
        return offset

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        raw = into.detach().view(-1).view(torch.uint8)
        raw.copy_(self._content[offset : offset + len(raw)])
        return super().read(offset, into)

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        raw = source.detach().view(-1).view(torch.uint8)
        self._content[offset : offset + len(raw)].copy_(raw)
        return super().write(offset, source)

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """Yield the content."""
        yield self._content[: self.end]


# For models that fit into memory: their offloaded values are those that training gave them.
SWAP_IN_MEMORY = replace(FAKE_SWAP, swap_file=lambda folders, nbytes, aio, where: _MemoryFile(nbytes))
