"""Collectives through memory that the ranks of one host share, and the tensors that peers read there in place.

    reduce_scatter   each rank posts a handle to its tensor; the owner of a part adds the parts in place
    all_gather       each rank posts a handle to its shard; peers copy it in
    broadcast        the source posts a handle to its tensor; peers copy it in

Peers can read a tensor in place if it lives in a :class:`SharedTensor`; what they need of any other is
copied into a segment first. Every rank decides for itself: the handle says which.

    a shared tensor   one segment with one tensor in it, owned by this process while the tensor or a view of it is alive
    lend              a collective whose source is in a shared tensor posts a handle to that place, which then has readers
    reader fence      wait_for_readers returns when all of them have read; only then may the source be overwritten

A shared tensor has the readers of one collective at a time, because a reader has one mark in it. A
source that still has readers is copied out, as an ordinary tensor is, so that no rank waits when a
collective starts. When the tensor is gone, its pages go back to the system at once, for all ranks that
map it, and the empty segment is kept for the next tensor.

Price per rank, n elements on N ranks: reads n (N-1)/N; writes as many sums or copies, and out of
ordinary memory n (N-1)/N (reduce_scatter) or n/N (all_gather) elements more; no payload passes through
a socket. A peer that ended is noticed by a rank that waits for its handle, or for it to have read. Sums
are made in rank order, as in direct exchange.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.comm.backends import DirectTransport, Finish, Received, Sum, Transport, Works, nothing, peers_from
from zero_trial.comm.shm.segments import (
    ELSEWHERE,
    HEADER,
    MappingBudget,
    PeerProcesses,
    SegmentHandle,
    SharedMemory,
    SharedSegment,
    capacity_for,
    create_segment,
    many_open,
)

log = logging.getLogger("zero_trial")

# From the first byte on: a message with the payload in it costs two to three times the processor time, also at 16 bytes.
WORTH_BYTES = 1


class SharedTransport(Transport):
    """Exchange on one axis whose ranks are all on this host. What has no elements goes through ``direct``.

    ``exchange`` carries the handles. ``tensors`` holds what peers read in place; they do so only where
    ranks can wait for one another in shared memory, which ``exchange`` knows. ``add`` makes the sums.
    """

    name = "shared memory"
    broadcasts = True

    def __init__(
        self,
        index: int,
        size: int,
        memory: SharedMemory,
        exchange: SharedHandleExchange | MessageHandleExchange,
        direct: DirectTransport,
        add: Sum,
        tensors: SharedTensorPool | None = None,
    ) -> None:
        self._index = index
        self._size = size
        self._memory = memory
        self._exchange = exchange
        self._direct = direct
        self._add = add
        self._peers = peers_from(index, size)
        self._processes = exchange.peers if isinstance(exchange, SharedHandleExchange) else None
        self._tensors = tensors if self._processes is not None else None

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.reduce_scatter(full, out, tag)
        parts, numel = full.view(self._size, -1), full.numel() // self._size
        part_bytes = numel * full.element_size()
        handle = self._lent(full)
        if handle is None:
            segment = self._memory.acquire(part_bytes * len(self._peers), self._peers)
            for peer in self._peers:
                payload = segment.payload(full.dtype, numel, place(peer, self._index) * part_bytes)
                payload.copy_(parts[peer])
            handle = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0, gap=part_bytes)
        posted = self._exchange.post(handle, tag, self._peers)

        def add_in_rank_order() -> Received:
            found = posted.handles
            received = {
                peer: self._memory.read(handle, full.dtype, numel, self._start(peer, part_bytes, handle.gap))
                for peer, handle in found.items()
            }
            own = parts[self._index]
            self._add([received.get(index, own) for index in range(self._size)], out)
            return Received(received, lambda: self._acknowledge(found.values()))

        return [posted], add_in_rank_order

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, *, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.all_gather(full, shard, tag)
        parts = full.view(self._size, -1)
        lent = self._lent(shard, again) if lend else None
        posted = self._exchange.post(lent or self._copied(shard), tag, self._peers)
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

        def copy_in() -> None:
            for peer, found in posted.handles.items():
                parts[peer].copy_(self._memory.read(found, full.dtype, shard.numel()))
                self._memory.acknowledge(found, self._index)

        return [posted], copy_in

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> tuple[Works, Finish]:
        if self._index == source:
            return [self._exchange.post(self._lent(values) or self._copied(values), tag, [])], nothing
        posted = self._exchange.post(None, tag, [source])

        def copy_in() -> None:
            found = posted.handles[source]
            values.copy_(self._memory.read(found, values.dtype, values.numel()))
            self._memory.acknowledge(found, self._index)

        return [posted], copy_in

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return super().buffer(numel, dtype) if self._tensors is None else self._tensors.empty(numel, dtype)

    @property
    def reads_in_place(self) -> bool:
        return self._tensors is not None

    def has_readers(self, tensor: torch.Tensor) -> bool:
        found = self._tensors.find(tensor) if self._tensors is not None else None
        return found is not None and found.has_readers

    def wait_for_readers(self, tensor: torch.Tensor, timeout: float) -> None:
        found = self._tensors.find(tensor) if self._tensors is not None else None
        if found is not None:
            found.wait_for_readers(timeout)

    def _lent(self, values: torch.Tensor, again: bool = False) -> SegmentHandle | None:
        """Return a handle to ``values`` itself, if peers can read it in place now."""
        if self._tensors is None or self._processes is None:
            return None
        found = self._tensors.lend(values, self._peers, self._processes, again=again)
        if found is None:
            return None
        segment, offset = found
        return SegmentHandle(os.getpid(), segment.descriptor, segment.generation, offset)

    def _copied(self, values: torch.Tensor) -> SegmentHandle:
        """Return a handle to a copy of ``values``."""
        segment = self._memory.acquire(values.numel() * values.element_size(), self._peers)
        segment.payload(values.dtype, values.numel()).copy_(values)
        return SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0)

    def _start(self, owner: int, part_bytes: int, gap: int) -> int:
        """Return where this rank's part begins, in bytes after the handle's place."""
        return self._index * part_bytes if gap == 0 else place(self._index, owner) * gap

    def _acknowledge(self, handles: Iterable[SegmentHandle]) -> None:
        for handle in handles:
            self._memory.acknowledge(handle, self._index)


def place(reader: int, owner: int) -> int:
    """Return which part of ``owner``'s segment is for ``reader``: parts are in the order of the readers."""
    return reader - (reader > owner)


# --- tensors that peers read in place ------------------------------------------------------------------------------

_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # of fallocate(2)


@dataclass
class SharedTensor:
    """A segment, the tensor that lives in it (a weak reference to what its storage holds on to), and its readers."""

    segment: SharedSegment
    start: int = 0  # address of the payload
    nbytes: int = 0
    owner: int = 0  # process id: a forked child has the same objects, and must not give away its parent's pages
    lease: weakref.ref[memoryview] | None = None
    peers: PeerProcesses | None = None
    lent: tuple[int, int] = (0, 0)  # bytes [start, stop) of the payload

    @property
    def taken(self) -> bool:
        """Its tensor is alive."""
        return self.lease is not None and self.lease() is not None

    @property
    def has_readers(self) -> bool:
        """A peer has not read it yet. Does not wait."""
        return not self.segment.free

    def wait_for_readers(self, timeout: float) -> None:
        """Return when all peers have read. Raises RuntimeError where one has ended (``closed``) or does not read (``timed out``)."""
        segment, marks = self.segment, self.segment.window.marks
        for reader in () if self.peers is None else segment.readers:
            self.peers.wait_until(reader, lambda reader=reader: marks[reader] == segment.generation, timeout)  # type: ignore[misc, union-attr]


@dataclass
class SharedTensorPool:
    """This process's shared tensors by address. ``ranks``: how many processes map each other's, this one included.

    They leave half of the process's descriptors to others, and half of the mappings that the kernel
    allows (see :class:`MappingBudget`). Price: the bytes of the tensors, each rounded up to 64 KiB, and
    4 KiB and one descriptor per tensor; peers map the same pages.
    """

    mappings: MappingBudget = field(default_factory=MappingBudget)
    ranks: int = 2
    _tensors: dict[int, SharedTensor] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _refused: bool = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros in a segment of its own; in ordinary memory, with one warning, where the system has none to give."""
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.zeros(numel, dtype=dtype)
        try:
            found = self._vacant(nbytes)
            # Allocates the pages now: a machine that has none left raises here, and does not kill the first process that writes.
            os.posix_fallocate(found.segment.descriptor, 0, HEADER + nbytes)
        except OSError as trouble:
            if not self._refused:
                self._refused = True
                log.warning(
                    "tensors that peers could read in place are in ordinary memory, which costs a copy each time: %s",
                    trouble,
                )
            return torch.zeros(numel, dtype=dtype)
        lease = found.segment.window.block[HEADER : HEADER + nbytes]
        found.nbytes, found.owner, found.peers = nbytes, os.getpid(), None
        found.lease = weakref.ref(lease, lambda _: _vacate(found))
        return torch.frombuffer(lease, dtype=dtype)

    def find(self, tensor: torch.Tensor) -> SharedTensor | None:
        """Return the shared tensor that holds a contiguous ``tensor``."""
        if not self._starts:
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        found = self._tensors[self._starts[at]]
        inside = address + tensor.nbytes <= found.start + found.nbytes
        return found if inside and found.taken else None

    def lend(
        self, tensor: torch.Tensor, readers: Sequence[int], peers: PeerProcesses, *, again: bool = False
    ) -> tuple[SharedSegment, int] | None:
        """Return where ``readers`` (axis indices) may read ``tensor``: its segment under a new generation, and the offset in it in bytes.

        None where it is in no shared tensor, or that has readers. ``again``: even then, if those are the same
        ``peers`` and ``tensor`` is part of what they read, for a collective that they read after the
        present one: an older generation must never be acknowledged after a newer one.
        """
        found = self.find(tensor)
        if found is None:
            return None
        start = tensor.data_ptr() - found.start
        stop = start + tensor.nbytes
        follows = again and found.peers is peers and found.lent[0] <= start and stop <= found.lent[1]
        if found.has_readers and not follows:
            return None
        found.segment.lend(readers)
        found.peers, found.lent = peers, (start, stop)
        return found.segment, start

    @property
    def taken_bytes(self) -> int:
        """Bytes of the tensors that are alive here."""
        return sum(found.nbytes for found in self._tensors.values() if found.taken)

    def _vacant(self, nbytes: int) -> SharedTensor:
        """Return the smallest empty segment that is large enough (its size is only a range of addresses), or a new one."""
        fitting = [
            found
            for found in self._tensors.values()
            if not (found.taken or found.has_readers) and found.segment.capacity >= nbytes
        ]
        if fitting:
            smallest = min(fitting, key=lambda found: found.segment.capacity)
            _vacate(smallest)  # again: peers may have been reading when its tensor was freed
            return smallest
        if not self.mappings.allow(len(self._tensors) + 1, self.ranks):
            limit = self.mappings.limit
            raise OSError(
                errno.ENOMEM,
                f"{len(self._tensors)} of them, on {self.ranks} ranks, are half of vm.max_map_count ({limit})",
            )
        segment = self.mappings.take(lambda: _new_segment(nbytes))
        made = SharedTensor(segment, segment.payload(torch.uint8, 1).data_ptr())
        self._tensors[made.start] = made
        self._starts = sorted(self._tensors)
        return made


def _new_segment(nbytes: int) -> SharedSegment:
    """Make a segment for ``nbytes``. Raises OSError where the system has none to give, or too few would be left for others."""
    segment = create_segment(capacity_for(nbytes))
    if many_open(segment.descriptor):
        os.close(segment.descriptor)
        raise OSError(errno.EMFILE, "half of the open files that `ulimit -Hn` allows are in use")
    return segment


def _vacate(found: SharedTensor) -> None:
    """Give the pages of a tensor that was freed back to the system; they read as zeros when they are used again. Not while peers read."""
    if found.owner == os.getpid() and not found.has_readers:
        punch = ctypes.CDLL(None, use_errno=True).fallocate
        punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        if punch(found.segment.descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, HEADER, found.segment.capacity):
            # This kernel cannot: the pages stay, and must read as zeros.
            found.segment.payload(torch.uint8, found.segment.capacity).zero_()


# --- handles: how ranks tell each other where payloads are ---------------------------------------------------------

SLOTS = 1024
_SLOT = struct.Struct("=qqqqqqqq")  # number, tag, process, descriptor, generation, offset, gap, unused: one cache line
_FIRST = 64
BLOCK_BYTES = _FIRST + SLOTS * _SLOT.size


class SharedHandleExchange:
    """Handles between ranks of one host through shared memory, without a socket or a thread.

    Every rank has one block that it alone writes and all others read: a ring of the handles of its last collectives, numbered.

        | number up to which I have read every rank's | slot 0: number, tag, handle | slot 1 ... | slot SLOTS - 1 |

    All ranks of the axis start their collectives in one order (also those of several engines on the same
    ranks), so number k is the same collective everywhere. Its handle goes into slot k mod SLOTS once
    every rank has read the slot's previous one: no rank is ever SLOTS collectives ahead.

    Price: about 2 microseconds to post, and as much per peer to read; a message through a socket costs 100 and more on both sides.
    """

    def __init__(self, own: mmap.mmap, others: Mapping[int, mmap.mmap], peers: PeerProcesses, timeout: float) -> None:
        self._own = own
        self._others = dict(others)
        self._numbers = {index: memoryview(block).cast("q") for index, block in others.items()}
        self._own_numbers = memoryview(own).cast("q")
        self.peers = peers
        self._timeout = timeout
        self._number = 0
        self._unread: set[int] = set()  # collectives whose handles this rank has not read yet

    def post(self, handle: SegmentHandle | None, tag: int, sources: Iterable[int]) -> PostedHandles:
        """Start the next collective: post ``handle``, if this rank sends something, and expect one from each of ``sources``."""
        self._number += 1
        number = self._number
        for index, numbers in self._numbers.items():
            if numbers[0] < number - SLOTS:
                self.peers.wait_until(index, lambda numbers=numbers: numbers[0] >= number - SLOTS, self._timeout)  # type: ignore[misc]
        if handle is not None:
            start = _FIRST + number % SLOTS * _SLOT.size
            fields = (handle.process, handle.descriptor, handle.generation, handle.offset, handle.gap, 0)
            _SLOT.pack_into(self._own, start, -1, tag, *fields)
            self._own_numbers[start // 8] = number  # last: a reader that sees the number sees the rest
        self._unread.add(number)
        return PostedHandles(self, number, tag, tuple(sources))

    def collect(self, number: int, tag: int, sources: Iterable[int], timeout: float) -> dict[int, SegmentHandle]:
        """Return the handles of collective ``number`` by axis index. Raises RuntimeError where one does not come, or is of another operation."""
        start = _FIRST + number % SLOTS * _SLOT.size
        at = start // 8
        found = {}
        for index in sources:
            numbers = self._numbers[index]
            if numbers[at] != number:
                self.peers.wait_until(index, lambda numbers=numbers: numbers[at] == number, timeout)  # type: ignore[misc]
            _, other_tag, *fields, _ = _SLOT.unpack_from(self._others[index], start)
            if other_tag != tag:
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            found[index] = SegmentHandle(*fields)
        self.forget(number)
        return found

    def forget(self, number: int) -> None:
        """Note that this rank will read nothing more of collective ``number``."""
        if number in self._unread:
            self._unread.remove(number)
            self._own_numbers[0] = min(self._unread, default=self._number + 1) - 1


class PostedHandles:
    """The handles of one collective, on their way; waited for like a work of torch.distributed."""

    def __init__(self, exchange: SharedHandleExchange, number: int, tag: int, sources: tuple[int, ...]) -> None:
        self._exchange = exchange
        self._number = number
        self._tag = tag
        self._sources = sources
        self.handles: dict[int, SegmentHandle] = {}

    def wait(self, timeout: timedelta) -> None:
        """Fill ``handles``, once they are all there."""
        self.handles = self._exchange.collect(self._number, self._tag, self._sources, timeout.total_seconds())

    def __del__(self) -> None:
        # Also where an error kept the caller from waiting: its peers must not be held up by that.
        self._exchange.forget(self._number)


class MessageHandleExchange:
    """Handles as messages of the process group, where ranks cannot wait in shared memory."""

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks
        self._index = ranks.index(dist.get_rank())

    def post(self, handle: SegmentHandle | None, tag: int, sources: Iterable[int]) -> MessageHandles:
        """Start the next collective; see :meth:`SharedHandleExchange.post`."""
        received = {peer: torch.empty(len(SegmentHandle._fields), dtype=torch.int64) for peer in sources}
        works: Works = [dist.irecv(received[peer], self._ranks[peer], group=self._group, tag=tag) for peer in received]
        if handle is not None:
            values = handle.to_tensor()
            peers = (rank for index, rank in enumerate(self._ranks) if index != self._index)
            works += [dist.isend(values, rank, group=self._group, tag=tag) for rank in peers]
        return MessageHandles(works, received)


class MessageHandles:
    """The handles of one collective, on their way as messages."""

    def __init__(self, works: Works, received: dict[int, torch.Tensor]) -> None:
        self._works = works
        self._received = received
        self.handles: dict[int, SegmentHandle] = {}

    def wait(self, timeout: timedelta) -> None:
        """Fill ``handles``, once they are all there."""
        for work in self._works:
            work.wait(timeout)
        self.handles = {peer: SegmentHandle.from_tensor(values) for peer, values in self._received.items()}
