"""Collectives through memory that the ranks of one host share: tensors, and the handles and small
values that the ranks exchange there.

    reduce_scatter   each rank posts a handle to its tensor; the owner of a part adds the parts in
                     place
    all_gather       each rank posts a handle to its shard; peers copy it in
    broadcast        the source posts a handle to its tensor; peers copy it in
    all_to_all       each rank posts a handle to what it sends; peers copy their parts in

What lives in a :class:`~zero_trial.comm.shm.segments.SharedTensor` is read in place; what peers
need of any other tensor is copied into a segment first, and so is a shared tensor that still has
the readers of an earlier collective, so that no rank waits when a collective starts. Every rank
decides for itself: the handle says which.

Price per rank, n elements on N ranks: reads n (N-1)/N; writes as many sums or copies, and out of
ordinary memory n (N-1)/N (reduce_scatter) or n/N (all_gather) elements more; no payload passes
through a socket. A peer that ended is noticed by a rank that waits for its handle, or for it to
have read. Sums are made in rank order, as in direct exchange.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.comm.backends import Counts, DirectTransport, Sum, Transport, nothing, peers_from
from zero_trial.comm.shm.peers import ELSEWHERE, PeerProcesses
from zero_trial.comm.shm.segments import SegmentHandle, SharedMemory, SharedTensorPool
from zero_trial.comm.waits import Finish, Received, Works

# From the first byte on: a message with the payload in it costs two to three times the processor
# time, also at 16 bytes.
WORTH_BYTES = 1


class SharedTransport(Transport):
    """Exchange on one axis whose ranks are all on this host.

    What has no elements goes through ``direct``.

    ``exchange`` carries the handles. ``tensors`` holds what peers read in place; they do so only
    where ranks can wait for one another in shared memory, which ``exchange`` knows. ``add`` makes
    the sums.
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
        self._peers = tuple(peers_from(index, size))
        self._processes = exchange.peers if isinstance(exchange, SharedHandleExchange) else None
        self.tensors = tensors if self._processes is not None else None

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.nbytes < WORTH_BYTES:
            return self._direct.reduce_scatter(full, out, tag)
        parts, numel, memory = full.view(self._size, -1), out.numel(), self._memory
        part_bytes = numel * full.element_size()
        handle = self._lend(full)
        if handle is None:
            segment = memory.acquire(part_bytes * len(self._peers), self._peers)
            for peer in self._peers:
                payload = segment.payload(full.dtype, numel, place(peer, self._index) * part_bytes)
                payload.copy_(parts[peer])
            handle = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0, gap=part_bytes)
        posted = self._exchange.post(handle, tag, self._peers)

        def add_in_rank_order() -> Received:
            index = self._index
            ordered, received = [parts[index]] * self._size, {}
            for peer, handle in posted.handles.items():
                # A peer that copied its parts out has left out its own.
                start = index * part_bytes if handle.gap == 0 else place(index, peer) * handle.gap
                ordered[peer] = received[peer] = memory.read(handle, full.dtype, numel, start)
            self._add(ordered, out)

            def release() -> None:
                for handle in posted.handles.values():
                    memory.acknowledge(handle, index)

            return Received(received, release)

        return [posted], add_in_rank_order

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, *, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        if full.nbytes < WORTH_BYTES:
            return self._direct.all_gather(full, shard, tag)
        parts, memory = full.view(self._size, -1), self._memory
        posted = self._exchange.post(
            (self._lend(shard, again) if lend else None) or self._copy(shard), tag, self._peers
        )
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

        def copy_in() -> None:
            for peer, found in posted.handles.items():
                parts[peer].copy_(memory.read(found, full.dtype, shard.numel()))
                # else each rank would have all of its peers' gradients in its resident memory
                memory.acknowledge(found, self._index, unmap=again)

        return [posted], copy_in

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> tuple[Works, Finish]:
        if self._index == source:
            return [self._exchange.post(self._lend(values) or self._copy(values), tag, [])], nothing
        posted = self._exchange.post(None, tag, [source])

        def copy_in() -> None:
            found = posted.handles[source]
            values.copy_(self._memory.read(found, values.dtype, values.numel()))
            self._memory.acknowledge(found, self._index)

        return [posted], copy_in

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, counts: Counts, tag: int) -> tuple[Works, Finish]:
        handed = sent if sent.numel() else sent.new_zeros(1)  # peers expect a handle all the same
        posted = self._exchange.post(self._lend(handed) or self._copy(handed), tag, self._peers)
        parts = received.split([row[self._index] for row in counts])

        def copy_in() -> None:
            for peer, found in posted.handles.items():
                if (part := parts[peer]).numel():
                    start = sum(counts[peer][: self._index]) * sent.element_size()
                    part.copy_(self._memory.read(found, sent.dtype, part.numel(), start))
                self._memory.acknowledge(found, self._index)

        return [posted], copy_in

    def free_messages(self) -> None:
        self._memory.free_idle()

    def free_kept(self) -> None:
        self.free_messages()
        if self.tensors is not None:
            self.tensors.free_kept()

    def _lend(self, values: torch.Tensor, again: bool = False) -> SegmentHandle | None:
        """Return a handle to ``values``, if peers can read them in place now."""
        if self.tensors is None or self._processes is None:
            return None
        shared = self.tensors.find(values)
        return shared.lend(values, self._peers, self._processes, again=again) if shared is not None else None

    def _copy(self, values: torch.Tensor) -> SegmentHandle:
        """Return a handle to a copy of ``values``."""
        segment = self._memory.acquire(values.nbytes, self._peers)
        segment.payload(values.dtype, values.numel()).copy_(values)
        return SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0)


def place(reader: int, owner: int) -> int:
    """Return which part of ``owner``'s segment is for ``reader``: parts are in the order of the
    readers.
    """
    return reader - (reader > owner)


# --- handles: how ranks tell each other where payloads are ----------------------------------------

HANDLE_SLOTS = 1024
# number, tag, process, descriptor, generation, offset, gap, unused: one cache line
_SLOT = struct.Struct("=qqqqqqqq")
_FIRST = 64
HANDLE_BLOCK_BYTES = _FIRST + HANDLE_SLOTS * _SLOT.size


class SharedHandleExchange:
    """Handles between ranks of one host through shared memory, without a socket or a thread.

    Every rank has one block that it alone writes and all others read: a ring of the handles of its
    last collectives, numbered.

        | number up to which I have read every rank's | slot 0 | slot 1 | ... | slot n - 1 |
        a slot: number, tag, handle

    All ranks of the axis start their collectives in one order (also those of several engines on the
    same ranks), so number k is the same collective everywhere. Its handle goes into slot k mod n
    once every rank has read the slot's previous one: no rank is ever n collectives ahead.

    Price: about 2 microseconds to post, and as much per peer to read; a message through a socket
    costs 100 and more on both sides.
    """

    def __init__(
        self,
        own: mmap.mmap,
        others: Mapping[int, mmap.mmap],
        peers: PeerProcesses,
        timeout: float,
        drop: Callable[[SegmentHandle], None],
    ) -> None:
        self._own = own
        self._own_numbers = memoryview(own).cast("q")
        self.others = {index: (block, memoryview(block).cast("q")) for index, block in others.items()}
        self.peers = peers
        self.drop = drop  # called for payloads that will not be read
        self._timeout = timeout
        self._number = 0
        # collectives whose handles this rank has not read yet
        self.unread: dict[int, weakref.ref[PostedHandles]] = {}

    def post(self, handle: SegmentHandle | None, tag: int, sources: Iterable[int]) -> PostedHandles:
        """Start the next collective: post ``handle``, if this rank sends something, and expect one
        from each of ``sources``.
        """
        self._number += 1
        number = self._number
        # What was started and is not waited for must not stop all that follows. The garbage
        # collector may forget one between any two lines.
        while (oldest := min(self.unread, default=number)) <= number - HANDLE_SLOTS // 2:
            found = self.unread.get(oldest)
            waiting = found() if found is not None else None
            if waiting is None:
                self.forget(oldest)
            else:
                waiting.wait(timedelta(seconds=self._timeout))
        for index, (_, numbers) in self.others.items():
            if numbers[0] < number - HANDLE_SLOTS:
                self.peers.wait_for(index, numbers, 0, number - HANDLE_SLOTS, self._timeout)
        if handle is not None:
            start = _FIRST + number % HANDLE_SLOTS * _SLOT.size
            _SLOT.pack_into(self._own, start, -1, tag, *handle, 0)
            # last: a reader that sees the number sees the rest
            self._own_numbers[start // 8] = number
        posted = PostedHandles(self, number, tag, sources)
        self.unread[number] = weakref.ref(posted)
        return posted

    def forget(self, number: int) -> None:
        """Note that this rank will read nothing more of collective ``number``."""
        self.unread.pop(number, None)
        self._own_numbers[0] = min(self.unread, default=self._number + 1) - 1


@dataclass(eq=False)
class PostedHandles:
    """The handles of collective ``number`` from ``sources``, on their way; waited for like a work
    of torch.distributed.
    """

    exchange: SharedHandleExchange
    number: int
    tag: int
    sources: Iterable[int]
    handles: dict[int, SegmentHandle] = field(default_factory=dict)

    def wait(self, timeout: timedelta) -> None:
        """Fill ``handles``, once they are all there.

        Raises RuntimeError where one does not come, or is of another operation.
        """
        exchange, number = self.exchange, self.number
        if number not in exchange.unread:
            return
        start = _FIRST + number % HANDLE_SLOTS * _SLOT.size
        at = start // 8
        for index in self.sources:
            block, numbers = exchange.others[index]
            if numbers[at] < number:
                exchange.peers.wait_for(index, numbers, at, number, timeout.total_seconds())
            _, tag, *fields, _ = _SLOT.unpack_from(block, start)
            if tag != self.tag:
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            self.handles[index] = SegmentHandle(*fields)
        exchange.forget(number)

    def __del__(self) -> None:
        # Also where an error kept the caller from waiting or reading: its peers must not be held up
        # by that, nor keep the memory of what they have posted.
        exchange, number = self.exchange, self.number
        if number in exchange.unread:
            at = (_FIRST + number % HANDLE_SLOTS * _SLOT.size) // 8
            self.sources = [index for index in self.sources if exchange.others[index][1][at] == number]
            with suppress(RuntimeError):
                self.wait(timedelta(0))
            exchange.forget(number)
        for handle in self.handles.values():
            exchange.drop(handle)


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


# --- small values of all ranks --------------------------------------------------------------------

HALF_BYTES = 4096
_HEADER = struct.Struct("=qqq")  # number, crc of the operation's name, bytes
CONTROL_CAPACITY = HALF_BYTES - _HEADER.size
CONTROL_BLOCK_BYTES = 64 + 2 * HALF_BYTES


class SharedControlBlock:
    """This rank's block and its view of the others', by axis index.

    Every rank writes its own block alone, and all others read it:

        | number of my last exchange | half 0: header, payload | half 1: header, payload |

    Exchange k goes into half k mod 2. A rank writes its half, then its number, and waits until
    every other rank's number is k or more. That number shows the others that this rank has read all
    of exchange k - 1, so a half is never overwritten before every rank has read it.

    Price: one write of the payload, one read per peer; about 10 microseconds between two ranks that
    arrive together, where a message takes 100.
    """

    def __init__(self, own: mmap.mmap, others: Mapping[int, mmap.mmap], peers: PeerProcesses) -> None:
        self._own = own
        self._others = dict(others)
        self._own_number = memoryview(own).cast("q")
        self._numbers = {index: memoryview(block).cast("q") for index, block in others.items()}
        self._peers = peers
        self._number = 0

    def exchange(self, name: str, payload: bytes, timeout: float) -> dict[int, bytes]:
        """Return every other rank's payload of this exchange.

        All ranks must call it with the same ``name`` and number of bytes.

        Raises RuntimeError where a rank has ended (``closed``), does not come (``timed out``) or is
        at another operation.
        """
        self._number += 1
        start = 64 + self._number % 2 * HALF_BYTES
        kind = zlib.crc32(name.encode())
        self._own[start + _HEADER.size : start + _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self._own, start, self._number, kind, len(payload))
        self._own_number[0] = self._number
        found = {}
        for index, block in self._others.items():
            numbers = self._numbers[index]
            if numbers[0] < self._number:
                self._peers.wait_for(index, numbers, 0, self._number, timeout)
            number, other_kind, size = _HEADER.unpack_from(block, start)
            if (number, other_kind, size) != (self._number, kind, len(payload)):
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            found[index] = bytes(block[start + _HEADER.size : start + _HEADER.size + size])
        return found
