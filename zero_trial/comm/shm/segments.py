"""Memory that ranks of one host share: anonymous segments of one rank, mapped by its peers.

A segment is a memfd: it has no name in any folder, so nothing is left behind when its ranks end,
however they end. Peers reach it through ``/proc/<pid>/fd/<fd>``, which the kernel permits to
processes of the same user.

    | acknowledgements: one int64 per reader | payload ........................ |
    0                                        HEADER bytes

The owner writes a payload under a new generation number and sends readers a handle to it; each
reader writes that number into its acknowledgement when it has read. A segment whose readers have
all acknowledged is free for the next payload. No rank waits for that: if none is free, another
segment is made.

Peers can read a tensor in place if it lives in a :class:`SharedTensor`: one segment with one tensor
in it, owned by this process while the tensor or a view of it is alive. A collective lends it to its
readers. The reader fence is :meth:`SharedSegment.wait_for_readers`: it returns when all of them
have read, and only then may the tensor be overwritten. When the tensor is gone, its pages go back
to the system at once, for all ranks that map it, and the empty segment is kept for the next tensor.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from zero_trial.comm.shm.peers import PeerProcesses

log = logging.getLogger("zero_trial")

HEADER = 4096
SMALLEST = 1 << 16
WORTH_A_CALL = 1 << 18  # bytes of a segment from which on pages are unmapped after a read

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# --- how many segments a process may map ----------------------------------------------------------

USUAL_LIMIT = 65530

Made = TypeVar("Made")


class MappingRefused(RuntimeError):
    """No further segment may be mapped: ``count`` are, and ``limit`` is the kernel's."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(f"{count} shared segments are mapped, and vm.max_map_count is {limit}")
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

    The kernel counts mappings, not bytes. Each segment is one in its owner and one in every rank
    that reads it. Segments leave a quarter of the limit to libraries, stacks and allocators, which
    the kernel would refuse, too, past the limit.
    """

    limit: int = field(default_factory=max_map_count)
    count: int = 0

    def take(self, make: Callable[[], Made]) -> Made:
        """Return what ``make`` maps, and count it.

        Raises MappingRefused where it would be too many.
        """
        if self.count >= self.limit * 3 // 4:
            raise MappingRefused(self.count, self.limit)
        made = make()
        self.count += 1
        return made

    def allow(self, own: int, ranks: int) -> bool:
        """Say whether ``ranks`` that have ``own`` segments each, and map each other's, stay below
        half of the limit.
        """
        return own * ranks <= self.limit // 2


# --- segments -------------------------------------------------------------------------------------


class MappedSegment:
    """A mapped segment: one mark (int64) per reader, and the payload as bytes."""

    def __init__(self, block: memoryview) -> None:
        self.block = block
        self.marks = block[:HEADER].cast("q")
        self._large = ctypes.addressof(ctypes.c_char.from_buffer(block)) if len(block) > WORTH_A_CALL else 0

    def unmap_pages(self) -> None:
        """Let the pages of a large payload count for its owner alone; the next read maps them
        again."""
        if self._large:
            _madvise(self._large + HEADER, len(self.block) - HEADER, mmap.MADV_DONTNEED)


@dataclass(eq=False)
class SharedSegment:
    """One rank's shared buffer as seen by its owner."""

    descriptor: int
    capacity: int  # bytes of payload
    window: MappedSegment
    generation: int = 0
    readers: tuple[int, ...] = ()
    peers: PeerProcesses | None = None  # the readers as processes, if they can be waited for

    def __del__(self) -> None:
        if not self.has_readers:  # a peer may still open it
            with suppress(OSError):
                os.close(self.descriptor)

    @property
    def has_readers(self) -> bool:
        """Say whether a reader of the last payload has not read it yet. Does not wait."""
        marks, generation = self.window.marks, self.generation
        for reader in self.readers:  # noqa: SIM110 - a generator takes three times as long, and this is asked several times per collective
            if marks[reader] != generation:
                return True
        return False

    def wait_for_readers(self, timeout: float) -> None:
        """Return when all readers have read.

        Raises RuntimeError where one has ended (``closed``) or does not read (``timed out``).
        """
        for reader in () if self.peers is None else self.readers:
            self.peers.wait_for(reader, self.window.marks, reader, self.generation, timeout)  # type: ignore[union-attr]

    def payload(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """Return ``numel`` elements from ``offset`` bytes after the payload's start, as a view."""
        return torch.frombuffer(self.window.block, dtype=dtype, count=numel, offset=HEADER + offset)


Segment = TypeVar("Segment", bound=SharedSegment)


class SegmentHandle(NamedTuple):
    """Where a payload is, and under which generation; sent as five int64."""

    process: int
    descriptor: int
    generation: int
    offset: int  # bytes from the start of the payload area
    # bytes of the owner's own part, which is left out; 0 where the owner's whole tensor is there
    gap: int = 0

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor(self, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> SegmentHandle:
        return cls(*(int(value) for value in values.tolist()))


@dataclass
class SharedMemory:
    """This process's segments, and its mappings of other processes'.

    Grows to what is in flight at once and is then reused.

    Price: the bytes of the payloads in flight, rounded up to 64 KiB.
    """

    mappings: MappingBudget = field(default_factory=MappingBudget)
    segments: list[SharedSegment] = field(default_factory=list)
    # bytes of all payloads so far: what was copied out, since peers could not read it where it lay
    written: int = 0
    # process id: a forked child has the same segments, and must not give away its parent's pages
    owner: int = field(default_factory=os.getpid)
    _mapped: dict[tuple[int, int], MappedSegment] = field(default_factory=dict)

    def acquire(self, nbytes: int, readers: Sequence[int]) -> SharedSegment:
        """Return a segment for ``nbytes`` of payload that the ranks ``readers`` will read, under a
        new generation.
        """
        found = next(
            (s for s in self.segments if nbytes <= s.capacity <= max(4 * nbytes, SMALLEST) and not s.has_readers), None
        )
        if found is None:
            found = self.mappings.take(lambda: _create_segment(capacity_for(nbytes), SharedSegment))
            self.segments.append(found)
        found.generation += 1
        found.readers = tuple(readers)
        self.written += nbytes
        return found

    def read(self, handle: SegmentHandle, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """Return a peer's payload, from ``offset`` bytes after the handle's place, as a view of its
        memory: valid until :meth:`acknowledge`.
        """
        window = self._mapped.get(handle[:2]) or self._map(handle)
        return torch.frombuffer(window.block, dtype=dtype, count=numel, offset=HEADER + handle.offset + offset)

    def acknowledge(self, handle: SegmentHandle, reader: int, *, unmap: bool = False) -> None:
        """Tell the owner that ``reader`` has read the payload, so that it may write there again.
        ``unmap``: a large payload's pages leave this process's resident memory until it reads there
        again, which costs page faults."""
        window = self._mapped.get(handle[:2]) or self._map(handle)
        if unmap:
            window.unmap_pages()
        window.marks[reader] = handle.generation

    def drop(self, handle: SegmentHandle, reader: int) -> None:
        """Acknowledge a payload that ``reader`` will not read, where its segment is mapped."""
        window = self._mapped.get(handle[:2])
        if window is not None and window.marks[reader] < handle.generation:
            window.marks[reader] = handle.generation

    def free_idle(self) -> None:
        """Give the pages of payloads that all have read back to the system, for all ranks that map
        them."""
        for segment in self.segments if self.owner == os.getpid() else ():
            if not segment.has_readers:
                _punch(segment)

    def _map(self, handle: SegmentHandle) -> MappedSegment:
        key = handle[:2]
        self._mapped[key] = self.mappings.take(lambda: _map_segment(*key))
        return self._mapped[key]


def capacity_for(nbytes: int) -> int:
    """Return the payload bytes of a new segment that has to hold ``nbytes``."""
    return max(-(-nbytes // SMALLEST), 1) * SMALLEST


def _create_segment(capacity: int, kind: type[Segment]) -> Segment:
    """Make an anonymous segment of ``capacity`` payload bytes.

    Raises OSError where the system has none to give.
    """
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    if many_open(descriptor):
        allow_more()
    try:
        os.ftruncate(descriptor, HEADER + capacity)
        return kind(descriptor, capacity, _map_segment(os.getpid(), descriptor))
    except OSError:
        os.close(descriptor)
        raise


def many_open(descriptor: int) -> bool:
    """Say whether half of the descriptors that this process may have are in use: a new one's number
    is the lowest that is free.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and descriptor >= most // 2


def allow_more() -> None:
    """Raise this process's limit of descriptors to what the system allows it (`ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _map_segment(process: int, descriptor: int) -> MappedSegment:
    """Map a process's whole segment. Raises OSError where it cannot be reached.

    Mapped by torch, because Python's ``mmap`` would keep a descriptor open for every segment of
    every peer.
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
    """Open a descriptor of this process for the same file.

    Raises OSError where it cannot be reached.
    """
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def map_file(descriptor: int) -> mmap.mmap:
    """Map the whole file; ``descriptor`` is closed."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


# --- tensors that peers read in place -------------------------------------------------------------

_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # of fallocate(2)


@dataclass(eq=False)
class SharedTensor(SharedSegment):
    """A segment, and the tensor that lives in it (a weak reference to what its storage holds on
    to).

    It has the readers of one collective at a time, because a reader has one mark in it.
    """

    start: int = 0  # address of the payload
    nbytes: int = 0
    # process id: a forked child has the same objects, and must not give away its parent's pages
    owner: int = 0
    lease: weakref.ref[memoryview] | None = None
    lent: tuple[int, int] = (0, 0)  # bytes [start, stop) of the payload
    keeps: bool = False  # its pages stay when the tensor is gone
    allocated: int = 0  # bytes of the payload that have pages for sure

    @property
    def taken(self) -> bool:
        """Say whether its tensor is alive."""
        return self.lease is not None and self.lease() is not None

    def lend(
        self, tensor: torch.Tensor, readers: tuple[int, ...], peers: PeerProcesses, *, again: bool = False
    ) -> SegmentHandle | None:
        """Let ``readers`` (axis indices) read ``tensor``, a part of this one; return the handle to
        it.

        None where it still has readers. ``again``: even then, if those are the same ``peers`` and
        ``tensor`` is part of what they read, for a collective that they read after the present one:
        an older generation must never be acknowledged after a newer one.
        """
        start = tensor.data_ptr() - self.start
        stop = start + tensor.nbytes
        follows = again and self.peers is peers and self.lent[0] <= start and stop <= self.lent[1]
        if not follows and self.has_readers:
            return None
        self.generation += 1
        self.readers, self.peers, self.lent = readers, peers, (start, stop)
        return SegmentHandle(os.getpid(), self.descriptor, self.generation, start)


@dataclass
class SharedTensorPool:
    """This process's shared tensors by address.

    ``ranks`` is how many processes map each other's, this one included. The tensors leave half of
    the process's descriptors to others, and half of the mappings that the kernel allows (see
    :class:`MappingBudget`). Price: the bytes of the tensors, each rounded up to 64 KiB, and 4 KiB
    and one descriptor per tensor; peers map the same pages.
    """

    mappings: MappingBudget = field(default_factory=MappingBudget)
    ranks: int = 2
    _tensors: dict[int, SharedTensor] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _refused: bool = False

    def share_with(self, ranks: int) -> None:
        """Note that ``ranks`` processes, this one included, map each other's tensors."""
        self.ranks = max(self.ranks, ranks)

    def empty(self, numel: int, dtype: torch.dtype, *, keep: bool = False) -> torch.Tensor:
        """Return a flat tensor of zeros in a segment of its own; in ordinary memory, with one
        warning, where the system has none to give.

        ``keep``: of any values. Its pages stay when it is gone, for the next tensor of this kind
            that fits: to allocate a page costs as much time as to copy it several times.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.zeros(numel, dtype=dtype)
        try:
            found = self._kept(nbytes) if keep else None
            found = found or self._vacant(nbytes, _twice(nbytes) if keep else None)
            if found.allocated < nbytes:
                # Allocates the pages now: a machine that has none left raises here, and does not
                # kill the first process that writes.
                os.posix_fallocate(found.descriptor, 0, HEADER + nbytes)
                found.allocated = nbytes
            found.keeps = keep
        except (OSError, MappingRefused) as trouble:
            if not self._refused:
                self._refused = True
                log.warning(
                    "tensors that peers could read in place are in ordinary memory, which costs a copy each time: %s",
                    trouble,
                )
            return torch.zeros(numel, dtype=dtype)
        lease = found.window.block[HEADER : HEADER + nbytes]
        found.nbytes, found.owner, found.peers = nbytes, os.getpid(), None
        found.lease = weakref.ref(lease, lambda _: None if found.keeps else _vacate(found))
        return torch.frombuffer(lease, dtype=dtype)

    def free_kept(self) -> None:
        """Give the pages of tensors that are gone back to the system, and those of others when
        they are gone."""
        for found in self._tensors.values():
            if found.keeps and (found.taken or not found.has_readers):
                found.keeps = False
        self._vacate_read()

    def find(self, tensor: torch.Tensor) -> SharedTensor | None:
        """Return the shared tensor that holds a contiguous ``tensor``."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        found = self._tensors[self._starts[at]]
        inside = address + tensor.nbytes <= found.start + found.nbytes
        return found if inside and found.lease is not None and found.lease() is not None else None

    @property
    def taken_bytes(self) -> int:
        """Return how many bytes the tensors have that are alive here."""
        return sum(found.nbytes for found in self._tensors.values() if found.taken)

    def _kept(self, nbytes: int) -> SharedTensor | None:
        """Return the smallest empty segment whose pages have stayed and that fits ``nbytes``."""
        fitting = [
            found
            for found in self._tensors.values()
            if found.keeps and nbytes <= found.capacity <= _twice(nbytes) and not (found.taken or found.has_readers)
        ]
        return min(fitting, key=lambda found: found.capacity, default=None)

    def _vacate_read(self) -> None:
        """Give back the pages of tensors that peers were still reading when they were freed, and
        have read since."""
        for found in self._tensors.values():
            if found.allocated and not (found.taken or found.keeps):
                _vacate(found)

    def _vacant(self, nbytes: int, most: int | None) -> SharedTensor:
        """Return the smallest empty segment that is large enough and of ``most`` bytes (None: its
        size is only a range of addresses), or a new one. What keeps its pages must be found again
        by tensors of that size, and not by much smaller ones.
        """
        self._vacate_read()
        fitting = [
            found
            for found in self._tensors.values()
            if not (found.taken or found.keeps or found.has_readers)
            and nbytes <= found.capacity <= (most or found.capacity)
        ]
        if fitting:
            smallest = min(fitting, key=lambda found: found.capacity)
            if smallest.allocated:  # its last reader has come since
                _vacate(smallest)
            return smallest
        if not self.mappings.allow(len(self._tensors) + 1, self.ranks):
            limit = self.mappings.limit
            raise OSError(
                f"{len(self._tensors)} of them, on {self.ranks} ranks, are half of vm.max_map_count ({limit})"
            )
        made = self.mappings.take(lambda: _new_tensor(nbytes))
        self._tensors[made.start] = made
        self._starts = sorted(self._tensors)
        return made


def _new_tensor(nbytes: int) -> SharedTensor:
    """Make a segment for a tensor of ``nbytes``.

    Raises OSError where the system has none to give, or too few would be left for others.
    """
    made = _create_segment(capacity_for(nbytes), SharedTensor)
    if many_open(made.descriptor):
        raise OSError(errno.EMFILE, "half of the open files that `ulimit -Hn` allows are in use")
    made.start = made.payload(torch.uint8, 1).data_ptr()
    return made


def _twice(nbytes: int) -> int:
    """Return the payload bytes of the largest segment for a tensor of ``nbytes`` whose pages
    stay."""
    return 2 * capacity_for(nbytes)


def _vacate(found: SharedTensor) -> None:
    """Give the pages of a tensor that was freed back to the system; they read as zeros when they
    are used again. Not while peers read.
    """
    if found.owner != os.getpid() or found.has_readers:
        return
    if not _punch(found):  # This kernel cannot: the pages stay, and must read as zeros.
        found.payload(torch.uint8, found.capacity).zero_()
    found.allocated = 0


def _punch(segment: SharedSegment) -> bool:
    """Give the pages of a payload back to the system; say whether the kernel can."""
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return not punch(segment.descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, HEADER, segment.capacity)
