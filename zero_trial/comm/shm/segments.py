"""Memory that ranks of one host share: anonymous segments of one rank, mapped by its peers; and waits for those processes.

A segment is a memfd: it has no name in any folder, so nothing is left behind when its ranks end,
however they end. Peers reach it through ``/proc/<pid>/fd/<fd>``, which the kernel permits to processes
of the same user.

    | acknowledgements: one int64 per reader | payload ........................ |
    0                                        HEADER bytes

The owner writes a payload under a new generation number and sends readers a handle to it; each reader
writes that number into its acknowledgement when it has read. A segment whose readers have all
acknowledged is free for the next payload. No rank waits for that: if none is free, another segment is
made. (Tensors that live in a segment and are read in place: :mod:`zero_trial.comm.shm.lending`.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

HEADER = 4096
READERS = HEADER // 8
SMALLEST = 1 << 16


# --- how many segments a process may map ---------------------------------------------------------------------------

USUAL_LIMIT = 65530

Made = TypeVar("Made")


class MappingRefused(OSError):
    """No further segment may be mapped: ``count`` are, and ``limit`` is the kernel's."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(errno.ENOMEM, f"{count} shared segments are mapped, and vm.max_map_count is {limit}")
        self.count = count
        self.limit = limit


def max_map_count(file: str = "/proc/sys/vm/max_map_count") -> int:
    """Return how many mappings the kernel allows a process: ``vm.max_map_count``."""
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return USUAL_LIMIT


@dataclass
class MappingBudget:
    """Counts the segments that this process maps: its own and its peers'.

    The kernel counts mappings, not bytes. Each segment is one in its owner and one in every rank that
    reads it. Segments leave a quarter of the limit to libraries, stacks and allocators, which the kernel
    would refuse, too, past the limit.
    """

    limit: int = field(default_factory=max_map_count)
    count: int = 0

    def take(self, make: Callable[[], Made]) -> Made:
        """Return what ``make`` maps, and count it. Raises MappingRefused where it would be too many."""
        if self.count >= self.limit * 3 // 4:
            raise MappingRefused(self.count, self.limit)
        made = make()
        self.count += 1
        return made

    def allow(self, own: int, ranks: int) -> bool:
        """Say whether ``ranks`` that have ``own`` segments each, and map each other's, stay below half of the limit."""
        return own * ranks <= self.limit // 2


# --- segments -------------------------------------------------------------------------------------------------------


class MappedSegment:
    """A mapped segment: one mark (int64) per reader, and the payload as bytes."""

    def __init__(self, block: memoryview) -> None:
        self.block = block
        self.marks = block[:HEADER].cast("q")

    def values(self, dtype: torch.dtype, numel: int, offset: int) -> torch.Tensor:
        """Return ``numel`` elements as a view, from ``offset`` bytes after the start of the payload."""
        return torch.frombuffer(self.block, dtype=dtype, count=numel, offset=HEADER + offset)


@dataclass
class SharedSegment:
    """One rank's shared buffer as seen by its owner."""

    descriptor: int
    capacity: int  # bytes of payload
    window: MappedSegment
    generation: int = 0
    readers: tuple[int, ...] = ()

    @property
    def free(self) -> bool:
        """Say whether all readers of the last payload have read it."""
        marks, generation = self.window.marks, self.generation
        for reader in self.readers:  # noqa: SIM110 - a generator takes three times as long, and this is asked several times per collective
            if marks[reader] != generation:
                return False
        return True

    def lend(self, readers: Sequence[int]) -> None:
        """Make what the segment holds a new payload, for these readers."""
        self.generation += 1
        self.readers = tuple(readers)

    def payload(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        return self.window.values(dtype, numel, offset)


class SegmentHandle(NamedTuple):
    """Where a payload is, and under which generation; sent as five int64."""

    process: int
    descriptor: int
    generation: int
    offset: int  # bytes from the start of the payload area
    gap: int = 0  # bytes of the owner's own part, which is left out; 0 where the owner's whole tensor is there

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor(self, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> SegmentHandle:
        return cls(*(int(value) for value in values.tolist()))


@dataclass
class SharedMemory:
    """This process's segments, and its mappings of other processes'. Grows to what is in flight at once and is then reused.

    Price: the bytes of the payloads in flight, rounded up to 64 KiB.
    """

    mappings: MappingBudget = field(default_factory=MappingBudget)
    segments: list[SharedSegment] = field(default_factory=list)
    written: int = 0  # bytes of all payloads so far: what was copied out, since peers could not read it where it lay
    _mapped: dict[tuple[int, int], MappedSegment] = field(default_factory=dict)

    def acquire(self, nbytes: int, readers: Sequence[int]) -> SharedSegment:
        """Return a segment for ``nbytes`` of payload that the ranks ``readers`` will read, under a new generation."""
        found = next((s for s in self.segments if nbytes <= s.capacity <= max(4 * nbytes, SMALLEST) and s.free), None)
        if found is None:
            found = self.mappings.take(lambda: create_segment(capacity_for(nbytes)))
            self.segments.append(found)
        found.lend(readers)
        self.written += nbytes
        return found

    def read(self, handle: SegmentHandle, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """Return a peer's payload, from ``offset`` bytes after the handle's place, as a view of its memory: valid until :meth:`acknowledge`."""
        return self._map(handle).values(dtype, numel, handle.offset + offset)

    def acknowledge(self, handle: SegmentHandle, reader: int) -> None:
        """Tell the owner that ``reader`` has read the payload, so that it may write there again."""
        self._map(handle).marks[reader] = handle.generation

    def _map(self, handle: SegmentHandle) -> MappedSegment:
        key = handle[:2]
        found = self._mapped.get(key)
        if found is None:
            found = self._mapped[key] = self.mappings.take(lambda: map_segment(*key))
        return found


def capacity_for(nbytes: int) -> int:
    """Return the payload bytes of a new segment that has to hold ``nbytes``."""
    return max(-(-nbytes // SMALLEST), 1) * SMALLEST


def create_segment(capacity: int) -> SharedSegment:
    """Make an anonymous segment of ``capacity`` payload bytes. Raises OSError where the system has none to give."""
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    if many_open(descriptor):
        allow_more()
    try:
        os.ftruncate(descriptor, HEADER + capacity)
        return SharedSegment(descriptor, capacity, map_segment(os.getpid(), descriptor))
    except OSError:
        os.close(descriptor)
        raise


def many_open(descriptor: int) -> bool:
    """Say whether half of the descriptors that this process may have are in use: a new one's number is the lowest that is free."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and descriptor >= most // 2


def allow_more() -> None:
    """Raise this process's limit of descriptors to what the system allows it (`ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def map_segment(process: int, descriptor: int) -> MappedSegment:
    """Map a process's whole segment. Raises OSError where it cannot be reached.

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
    return MappedSegment(memoryview(block).cast("B"))


def open_descriptor(process: int, descriptor: int) -> int:
    """Open a descriptor of this process for the same file. Raises OSError where it cannot be reached."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def map_file(descriptor: int) -> mmap.mmap:
    """Map the whole file; ``descriptor`` is closed."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


# --- waiting for processes of this host ----------------------------------------------------------------------------

ELSEWHERE = "is at another operation"  # in the text of an error: a rank has come, with another call

_SPIN_SECONDS = 1e-4  # ranks that arrive together meet within this; then the core is given to others
_LONGEST_NAP_SECONDS = 1e-3
_LOOK_SECONDS = 0.05  # how often a waiting rank checks that its peers are alive


def shared_waits_supported() -> bool:
    """Say whether ranks can wait for one another in shared memory: processes can be watched, and this machine keeps the order of
    writes (x86), on which a number that is written after its payload relies."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open")


class PeerProcesses:
    """The other ranks of an axis as processes: axis index -> process id."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._watches = {index: os.pidfd_open(process) for index, process in processes.items()}

    def wait_until(self, index: int, ready: Callable[[], bool], timeout: float) -> None:
        """Return when ``ready()``. Raises RuntimeError when the process of axis index ``index`` has ended (``closed``) or after ``timeout``
        seconds (``timed out``).

        Spins for a moment, then naps: a rank that waits long leaves its core to the one that it waits for.
        """
        if ready():
            return
        begun = time.monotonic()
        nap, look, deadline = 0.0, begun + _LOOK_SECONDS, begun + timeout
        while not ready():
            now = time.monotonic()
            if now - begun < _SPIN_SECONDS:
                os.sched_yield()
                continue
            if now >= look:
                look = now + _LOOK_SECONDS
                if self._has_ended(index) and not ready():
                    raise RuntimeError(f"closed: the process of axis index {index} has ended")
            if now >= deadline:
                raise RuntimeError("timed out")
            nap = min(nap + 2e-5, _LONGEST_NAP_SECONDS)
            time.sleep(nap)

    def _has_ended(self, index: int) -> bool:
        """Say whether the process has ended, also if its exit status has not been read yet."""
        poll = select.poll()
        poll.register(self._watches[index], select.POLLIN)
        return bool(poll.poll(0))
