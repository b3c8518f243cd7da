"""Memory that ranks of one host share: anonymous segments of one rank, mapped by its peers.

A segment is a memfd: it has no name in any folder, so nothing is left behind when its ranks end, however they end. Peers reach it through
``/proc/<pid>/fd/<fd>``, which the kernel permits to processes of the same user.

    | acknowledgements: one int64 per reader | payload ........................ |
    0                                        HEADER bytes

The owner writes a payload under a new generation number and tells readers (by message) where it is; each reader writes that number into its
acknowledgement when it has read. A segment whose readers have all acknowledged is free for the next payload. Nobody ever waits for that: if
none is free, another segment is made.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

HEADER = 4096
READERS = HEADER // 8
SMALLEST = 1 << 16


@dataclass
class Segment:
    """One rank's shared buffer as seen by its owner."""

    descriptor: int
    capacity: int  # bytes of payload
    bytes_: torch.Tensor  # (HEADER + capacity,) uint8
    generation: int = 0
    readers: tuple[int, ...] = ()

    @property
    def free(self) -> bool:
        """All readers of the last payload have read it."""
        marks = self.bytes_[:HEADER].view(torch.int64)
        return all(int(marks[reader]) == self.generation for reader in self.readers)

    def payload(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        start = HEADER + offset
        return self.bytes_[start : start + numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Ticket:
    """What a message says about a payload: where it lies and under which generation; sent as four int64."""

    process: int
    descriptor: int
    generation: int
    offset: int  # bytes from the start of the payload area

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor([self.process, self.descriptor, self.generation, self.offset], dtype=torch.int64)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> Ticket:
        return cls(*(int(value) for value in values.tolist()))


@dataclass
class SharedMemory:
    """This process's segments, and its mappings of other processes'. Grows to what is in flight at once and is then reused.

    Price: the bytes of the payloads in flight, rounded up to 64 KiB.
    """

    segments: list[Segment] = field(default_factory=list)
    _mapped: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def acquire(self, nbytes: int, readers: Sequence[int]) -> Segment:
        """A segment for ``nbytes`` of payload that the ranks ``readers`` will read; its generation is new."""
        found = next((s for s in self.segments if nbytes <= s.capacity <= max(4 * nbytes, SMALLEST) and s.free), None)
        if found is None:
            found = create_segment(capacity_for(nbytes))
            self.segments.append(found)
        found.generation += 1
        found.readers = tuple(readers)
        return found

    def read(self, ticket: Ticket, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """A peer's payload, from ``offset`` bytes behind the ticket's place on, as a view of its memory: valid until :meth:`acknowledge`."""
        whole = self._map(ticket)
        start = HEADER + ticket.offset + offset
        return whole[start : start + numel * dtype.itemsize].view(dtype)

    def acknowledge(self, ticket: Ticket, reader: int) -> None:
        """``reader`` has read the payload; its owner may write there again."""
        self._map(ticket)[:HEADER].view(torch.int64)[reader] = ticket.generation

    def _map(self, ticket: Ticket) -> torch.Tensor:
        key = (ticket.process, ticket.descriptor)
        if key not in self._mapped:
            self._mapped[key] = map_descriptor(ticket.process, ticket.descriptor)
        return self._mapped[key]


def capacity_for(nbytes: int) -> int:
    """Payload bytes of a new segment that has to hold ``nbytes``."""
    return max(-(-nbytes // SMALLEST), 1) * SMALLEST


def create_segment(capacity: int) -> Segment:
    """A new anonymous segment of ``capacity`` payload bytes. Raises OSError where the system has none to give."""
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, HEADER + capacity)
    return Segment(descriptor, capacity, _bytes_of(descriptor))


def map_descriptor(process: int, descriptor: int) -> torch.Tensor:
    """Another process's segment, whole. Raises OSError where it cannot be reached."""
    return torch.frombuffer(map_file(open_descriptor(process, descriptor)), dtype=torch.uint8)


def open_descriptor(process: int, descriptor: int) -> int:
    """A descriptor of this process for the same file. Raises OSError where it cannot be reached."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def map_file(descriptor: int) -> mmap.mmap:
    """The whole file in memory; ``descriptor`` is closed."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _bytes_of(descriptor: int) -> torch.Tensor:
    return torch.frombuffer(map_file(os.dup(descriptor)), dtype=torch.uint8)
