"""Memory that ranks of one host share: anonymous segments of one rank, mapped by its peers.

A segment is a memfd: it has no name in any folder, so nothing is left behind when its ranks end, however they end. Peers reach it through
``/proc/<pid>/fd/<fd>``, which the kernel permits to processes of the same user.

    | acknowledgements: one int64 per reader | payload ........................ |
    0                                        HEADER bytes

The owner writes a payload under a new generation number and tells readers (by ticket) where it is; each reader writes that number into its
acknowledgement when it has read. A segment whose readers have all acknowledged is free for the next payload. Nobody ever waits for that: if
none is free, another segment is made. (Tensors that live in a segment and are read in place: :mod:`zero_trial.mesh.shared_homes`.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zero_trial.mesh.mappings import Mappings

HEADER = 4096
READERS = HEADER // 8
SMALLEST = 1 << 16


class Window:
    """A mapped segment: one mark (int64) per reader, and the payload as bytes."""

    def __init__(self, block: memoryview) -> None:
        self.block = block
        self.marks = block[:HEADER].cast("q")

    def values(self, dtype: torch.dtype, numel: int, offset: int) -> torch.Tensor:
        """``numel`` elements from ``offset`` bytes behind the start of the payload on, as a view."""
        return torch.frombuffer(self.block, dtype=dtype, count=numel, offset=HEADER + offset)


@dataclass
class Segment:
    """One rank's shared buffer as seen by its owner."""

    descriptor: int
    capacity: int  # bytes of payload
    window: Window
    generation: int = 0
    readers: tuple[int, ...] = ()

    @property
    def free(self) -> bool:
        """All readers of the last payload have read it."""
        marks, generation = self.window.marks, self.generation
        for reader in self.readers:  # noqa: SIM110 - a generator takes three times as long, and this is asked several times per collective
            if marks[reader] != generation:
                return False
        return True

    def lend(self, readers: Sequence[int]) -> None:
        """What lies here is from now on a new payload, for these readers."""
        self.generation += 1
        self.readers = tuple(readers)

    def payload(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        return self.window.values(dtype, numel, offset)


class Ticket(NamedTuple):
    """What a message says about a payload: where it lies and under which generation; sent as five int64."""

    process: int
    descriptor: int
    generation: int
    offset: int  # bytes from the start of the payload area
    gap: int = (
        0  # bytes that are left out where the owner's own part would be; 0 where the owner's tensor lies there whole
    )

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor(self, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> Ticket:
        return cls(*(int(value) for value in values.tolist()))


@dataclass
class SharedMemory:
    """This process's segments, and its mappings of other processes'. Grows to what is in flight at once and is then reused.

    Price: the bytes of the payloads in flight, rounded up to 64 KiB.
    """

    mappings: Mappings = field(default_factory=Mappings)
    segments: list[Segment] = field(default_factory=list)
    written: int = 0  # bytes of all payloads so far: what was copied out, since peers could not read it where it lay
    _mapped: dict[tuple[int, int], Window] = field(default_factory=dict)

    def acquire(self, nbytes: int, readers: Sequence[int]) -> Segment:
        """A segment for ``nbytes`` of payload that the ranks ``readers`` will read; its generation is new."""
        found = next((s for s in self.segments if nbytes <= s.capacity <= max(4 * nbytes, SMALLEST) and s.free), None)
        if found is None:
            found = self.mappings.take(lambda: create_segment(capacity_for(nbytes)))
            self.segments.append(found)
        found.lend(readers)
        self.written += nbytes
        return found

    def read(self, ticket: Ticket, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """A peer's payload, from ``offset`` bytes behind the ticket's place on, as a view of its memory: valid until :meth:`acknowledge`."""
        return self._map(ticket).values(dtype, numel, ticket.offset + offset)

    def acknowledge(self, ticket: Ticket, reader: int) -> None:
        """``reader`` has read the payload; its owner may write there again."""
        self._map(ticket).marks[reader] = ticket.generation

    def _map(self, ticket: Ticket) -> Window:
        key = ticket[:2]
        found = self._mapped.get(key)
        if found is None:
            found = self._mapped[key] = self.mappings.take(lambda: map_segment(*key))
        return found


def capacity_for(nbytes: int) -> int:
    """Payload bytes of a new segment that has to hold ``nbytes``."""
    return max(-(-nbytes // SMALLEST), 1) * SMALLEST


def create_segment(capacity: int) -> Segment:
    """A new anonymous segment of ``capacity`` payload bytes. Raises OSError where the system has none to give."""
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    if many_open(descriptor):
        allow_more()
    try:
        os.ftruncate(descriptor, HEADER + capacity)
        return Segment(descriptor, capacity, map_segment(os.getpid(), descriptor))
    except OSError:
        os.close(descriptor)
        raise


def many_open(descriptor: int) -> bool:
    """Whether half of the descriptors that this process may have are in use: a new one's number is the lowest that is free."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and descriptor >= most // 2


def allow_more() -> None:
    """This process may have as many descriptors as the system allows it without asking anybody (`ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def map_segment(process: int, descriptor: int) -> Window:
    """A process's segment, whole. Raises OSError where it cannot be reached.

    Mapped by torch, because Python's ``mmap`` would keep a descriptor open for every segment of every peer.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    size = os.stat(path).st_size
    try:
        storage = torch.UntypedStorage.from_file(path, True, size)
    except RuntimeError as trouble:
        raise OSError(f"{path} cannot be mapped: {str(trouble).splitlines()[0]}") from trouble
    block = (ctypes.c_char * size).from_address(storage.data_ptr())
    block.storage = storage  # type: ignore[attr-defined]  # views of the block keep the mapping alive
    return Window(memoryview(block).cast("B"))


def open_descriptor(process: int, descriptor: int) -> int:
    """A descriptor of this process for the same file. Raises OSError where it cannot be reached."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def map_file(descriptor: int) -> mmap.mmap:
    """The whole file in memory; ``descriptor`` is closed."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
