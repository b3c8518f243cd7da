"""Tensors that live in shared segments, so that peers read them where they lie instead of a copy.

    a home      one segment with one tensor in it, owned by this process as long as that tensor or a view of it is alive
    lend        a collective whose source lies in a home hands its peers a ticket to that place; from then on the home is lent
    settle      returns when all of them have read; only then may the source be overwritten

A home is lent to one collective at a time, because a reader has one mark in it: a source in a home that is still lent is copied out, as any
other tensor is. So nobody waits when a collective starts. When the tensor is gone the home's pages go back to the system at once, for all who
have mapped it, and the empty segment waits for the next tensor. Homes leave half of the process's descriptors to others, and half of the
mappings that the kernel allows (:mod:`zero_trial.comm.shm.segments`).

Price: a home's bytes are those of its tensor, rounded up to 64 KiB, and 4 KiB; peers map the same pages. One descriptor per home.
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
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_trial.comm.backends import DirectTransport, Finish, Received, Sum, Works
from zero_trial.comm.health import Watchdog
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


_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # of fallocate(2)


@dataclass
class SharedTensor:
    """A segment, the tensor that lives in it (by a weak reference to what its storage holds on to), and who reads it now."""

    segment: SharedSegment
    start: int = 0  # address of the payload
    nbytes: int = 0
    owner: int = 0  # process: a forked child has the same objects, and must not give away its parent's pages
    lease: weakref.ref[memoryview] | None = None
    peers: PeerProcesses | None = None
    lent: tuple[int, int] = (0, 0)  # bytes [start, stop) of the payload

    @property
    def taken(self) -> bool:
        return self.lease is not None and self.lease() is not None

    @property
    def settled(self) -> bool:
        """Nobody reads it any more. Does not wait."""
        return self.segment.free

    def settle(self, timeout: float) -> None:
        """Returns when all that it was lent to have read. Raises RuntimeError where one has ended (``closed``) or does not read (``timed out``)."""
        segment, marks = self.segment, self.segment.window.marks
        for reader in () if self.peers is None else segment.readers:
            self.peers.await_(reader, lambda reader=reader: marks[reader] == segment.generation, timeout)  # type: ignore[misc, union-attr]


@dataclass
class SharedTensorPool:
    """This process's homes by address. ``ranks``: how many map each other's, this one included."""

    mappings: MappingBudget = field(default_factory=MappingBudget)
    ranks: int = 2
    _homes: dict[int, SharedTensor] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _refused: bool = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros in a home of its own; in ordinary memory where the system has no segment to give, which is said once."""
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.zeros(numel, dtype=dtype)
        try:
            home = self._vacant(nbytes)
            # The pages are there from now on: a machine that has none left says so here, and does not kill whoever writes first.
            os.posix_fallocate(home.segment.descriptor, 0, HEADER + nbytes)
        except OSError as trouble:
            if not self._refused:
                self._refused = True
                log.warning(
                    "tensors that peers could read in place lie in ordinary memory, which costs a copy each time: %s",
                    trouble,
                )
            return torch.zeros(numel, dtype=dtype)
        lease = home.segment.window.block[HEADER : HEADER + nbytes]
        home.nbytes, home.owner, home.peers = nbytes, os.getpid(), None
        home.lease = weakref.ref(lease, lambda _: _vacate(home))
        return torch.frombuffer(lease, dtype=dtype)

    def find(self, tensor: torch.Tensor) -> SharedTensor | None:
        """The home in which a contiguous tensor lies."""
        if not self._starts:
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        home = self._homes[self._starts[at]]
        inside = address + tensor.nbytes <= home.start + home.nbytes
        return home if inside and home.taken else None

    def lend(
        self, tensor: torch.Tensor, readers: Sequence[int], peers: PeerProcesses, *, again: bool = False
    ) -> tuple[SharedSegment, int] | None:
        """Where ``readers`` (axis indices) may read ``tensor``: its home's segment under a new generation, and the offset in it in bytes.

        None where it lies in no home, or its home is lent. ``again``: even then, if it is lent to the same ``peers`` and ``tensor`` is part of
        that, for a collective that they read after the present one: an older generation must never be acknowledged after a newer one.
        """
        home = self.find(tensor)
        if home is None:
            return None
        start = tensor.data_ptr() - home.start
        stop = start + tensor.nbytes
        follows = again and home.peers is peers and home.lent[0] <= start and stop <= home.lent[1]
        if not (follows or home.settled):
            return None
        home.segment.lend(readers)
        home.peers, home.lent = peers, (start, stop)
        return home.segment, start

    @property
    def taken_bytes(self) -> int:
        """Bytes of the tensors that live here."""
        return sum(home.nbytes for home in self._homes.values() if home.taken)

    def _vacant(self, nbytes: int) -> SharedTensor:
        """The smallest empty home that is large enough (its size is only a range of addresses), or a new one."""
        fitting = [
            home for home in self._homes.values() if not home.taken and home.settled and home.segment.capacity >= nbytes
        ]
        if fitting:
            home = min(fitting, key=lambda home: home.segment.capacity)
            _vacate(home)  # again: readers may have been at it when its tensor went
            return home
        if not self.mappings.allow(len(self._homes) + 1, self.ranks):
            limit = self.mappings.limit
            raise OSError(
                errno.ENOMEM,
                f"{len(self._homes)} of them, on {self.ranks} ranks, are half of vm.max_map_count ({limit})",
            )
        segment = self.mappings.take(lambda: _new_segment(nbytes))
        home = SharedTensor(segment, segment.payload(torch.uint8, 1).data_ptr())
        self._homes[home.start] = home
        self._starts = sorted(self._homes)
        return home


def _new_segment(nbytes: int) -> SharedSegment:
    """For ``nbytes``. Raises OSError where the system has none to give, or too few would be left for others."""
    segment = create_segment(capacity_for(nbytes))
    if many_open(segment.descriptor):
        os.close(segment.descriptor)
        raise OSError(errno.EMFILE, "half of the open files that `ulimit -Hn` allows are in use")
    return segment


def _vacate(home: SharedTensor) -> None:
    """The tensor is gone: its pages go back to the system, and read as zeros when they are used again. Not while peers read."""
    if home.owner == os.getpid() and home.settled:
        punch = ctypes.CDLL(None, use_errno=True).fallocate
        punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        if punch(home.segment.descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, HEADER, home.segment.capacity):
            home.segment.payload(
                torch.uint8, home.segment.capacity
            ).zero_()  # a kernel that cannot: the pages stay, and must read as zeros


# Tickets between ranks of one host through shared memory: where a payload lies, told without a socket or a thread.
#
# Every rank has one block that it alone writes and all others read: a ring of the tickets of its last collectives, numbered.
#
#     | number up to which I have read everyone's | slot 0: number, tag, ticket | slot 1 ... | slot SLOTS - 1 |
#
# All ranks of the axis start their collectives in one order (also those of several engines on the same ranks), so number k is the same collective
# everywhere. Its ticket goes into slot k mod SLOTS once everybody has read what was there: nobody ever is SLOTS collectives ahead.
#
# Price: about 2 microseconds to tell, and as much per peer to be told; a message through a socket costs 100 and more on both sides.


SLOTS = 1024


_SLOT = struct.Struct(
    "=qqqqqqqq"
)  # number, tag, process, descriptor, generation, offset, gap, nothing: 64 bytes, a line of the cache


_FIRST = 64


BLOCK_BYTES = _FIRST + SLOTS * _SLOT.size


class SharedHandleExchange:
    """This rank's ring of tickets and its view of the others'."""

    def __init__(self, own: mmap.mmap, others: Mapping[int, mmap.mmap], peers: PeerProcesses, timeout: float) -> None:
        self._own = own
        self._others = dict(others)
        self._numbers = {index: memoryview(block).cast("q") for index, block in others.items()}
        self._own_numbers = memoryview(own).cast("q")
        self.peers = peers
        self._timeout = timeout
        self._number = 0
        self._unread: set[int] = set()  # collectives whose tickets this rank has not read yet

    def post(self, ticket: SegmentHandle | None, tag: int, sources: Iterable[int]) -> PostedHandles:
        """Starts the next collective: tells ``ticket``, if this rank has something to tell, and expects one from each of ``sources``."""
        self._number += 1
        number = self._number
        for index, numbers in self._numbers.items():
            if numbers[0] < number - SLOTS:
                self.peers.await_(index, lambda numbers=numbers: numbers[0] >= number - SLOTS, self._timeout)  # type: ignore[misc]
        if ticket is not None:
            start = _FIRST + number % SLOTS * _SLOT.size
            fields = (ticket.process, ticket.descriptor, ticket.generation, ticket.offset, ticket.gap, 0)
            _SLOT.pack_into(self._own, start, -1, tag, *fields)
            self._own_numbers[start // 8] = number  # last: who sees it sees the rest
        self._unread.add(number)
        return PostedHandles(self, number, tag, tuple(sources))

    def collect(self, number: int, tag: int, sources: Iterable[int], timeout: float) -> dict[int, SegmentHandle]:
        """The tickets of collective ``number`` by axis index. Raises RuntimeError where one does not come, or belongs to another operation."""
        start = _FIRST + number % SLOTS * _SLOT.size
        at = start // 8
        found = {}
        for index in sources:
            numbers = self._numbers[index]
            if numbers[at] != number:
                self.peers.await_(index, lambda numbers=numbers: numbers[at] == number, timeout)  # type: ignore[misc]
            _, other_tag, *fields, _ = _SLOT.unpack_from(self._others[index], start)
            if other_tag != tag:
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            found[index] = SegmentHandle(*fields)
        self.forget(number)
        return found

    def forget(self, number: int) -> None:
        """Nothing of collective ``number`` will be read here any more."""
        if number in self._unread:
            self._unread.remove(number)
            self._own_numbers[0] = min(self._unread, default=self._number + 1) - 1


class PostedHandles:
    """The tickets of one collective, on their way; waited for like a work of torch.distributed."""

    def __init__(self, mail: SharedHandleExchange, number: int, tag: int, sources: tuple[int, ...]) -> None:
        self._mail = mail
        self._number = number
        self._tag = tag
        self._sources = sources
        self.tickets: dict[int, SegmentHandle] = {}

    def wait(self, timeout: timedelta) -> None:
        self.tickets = self._mail.collect(self._number, self._tag, self._sources, timeout.total_seconds())

    def __del__(self) -> None:
        self._mail.forget(
            self._number
        )  # also where an error kept the caller from waiting: nobody is to be held up by it


# Collectives between ranks of one host through memory that they share: one read in, a ticket, and a copy out where a tensor is not at home.
#
#     reduce_scatter   each rank tells where its tensor lies; the owner of a part adds the parts where they lie
#     all_gather       each rank tells where its shard lies; peers copy it in
#     broadcast        the source tells where its tensor lies; peers copy it in
#
# A tensor lies where its peers can read it if it is in a home (:mod:`zero_trial.comm.shm.lending`); what they need of any other is copied into a
# segment first. Every rank decides for itself: the ticket says which.
#
# Price per rank, n elements on N ranks: reads n (N-1)/N; writes as many sums or copies, and out of ordinary memory n (N-1)/N (reduce_scatter) or n/N
# (all_gather) elements more; no payload passes through a socket. A peer that ended is noticed by whoever waits for its ticket, or for it to have
# read. Sums are made in rank order, as in direct exchange.


WORTH_BYTES = 1  # from the first byte on: a message with the payload in it costs two to three times the processor time, also at 16 bytes


class PendingHandles(Protocol):
    """The tickets of one collective, on their way; they are there after :meth:`wait`."""

    tickets: dict[int, SegmentHandle]

    def wait(self, timeout: timedelta) -> None: ...


class HandleExchange(Protocol):
    """How ranks tell each other where payloads lie: in shared memory (:class:`SharedMail`) or by message."""

    def post(self, ticket: SegmentHandle | None, tag: int, sources: Iterable[int]) -> PendingHandles: ...


class SharedTransport:
    """Exchange on one axis whose ranks are all on this host. What has no elements goes through ``direct``.

    ``add`` makes the sums. ``homes``: where tensors can live that are read in place; None where ranks cannot wait for one another in shared memory.
    """

    def __init__(
        self,
        index: int,
        size: int,
        memory: SharedMemory,
        mail: HandleExchange,
        direct: DirectTransport,
        add: Sum,
        homes: SharedTensorPool | None = None,
    ) -> None:
        self._index = index
        self._size = size
        self._memory = memory
        self._mail = mail
        self._direct = direct
        self._add = add
        self._peers = mail.peers if isinstance(mail, SharedHandleExchange) else None
        self.homes = homes if self._peers is not None else None

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.reduce_scatter(full, out, tag)
        parts = full.view(self._size, -1)
        peers, numel = self._direct.peers(), full.numel() // self._size
        part_bytes = numel * full.element_size()
        ticket = self._lent(full)
        if ticket is None:
            segment = self._memory.acquire(part_bytes * len(peers), peers)
            for peer in peers:
                payload = segment.payload(full.dtype, numel, place(peer, self._index) * part_bytes)
                payload.copy_(parts[peer])
            ticket = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0, gap=part_bytes)
        letters = self._mail.post(ticket, tag, peers)

        def add_in_rank_order() -> Received:
            found = letters.tickets
            received = {
                peer: self._memory.read(ticket, full.dtype, numel, self._start(peer, part_bytes, ticket.gap))
                for peer, ticket in found.items()
            }
            own = parts[self._index]
            self._add([received.get(index, own) for index in range(self._size)], out)
            return Received(received, lambda: self._acknowledge(found.values()))

        return [letters], add_in_rank_order

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.all_gather(full, shard, tag)
        parts, peers = full.view(self._size, -1), self._direct.peers()
        lent = self._lent(shard, again) if lend else None
        letters = self._mail.post(lent or self._copied(shard), tag, peers)
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

        def copy_in() -> None:
            for peer, found in letters.tickets.items():
                parts[peer].copy_(self._memory.read(found, full.dtype, shard.numel()))
                self._memory.acknowledge(found, self._index)

        return [letters], copy_in

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> tuple[Works, Finish]:
        """``values`` (flat) of axis index ``source`` into everyone else's. The source writes n elements (none from a home), a peer reads n."""
        if self._index == source:
            return [self._mail.post(self._lent(values) or self._copied(values), tag, [])], _nothing
        letters = self._mail.post(None, tag, [source])

        def copy_in() -> None:
            found = letters.tickets[source]
            values.copy_(self._memory.read(found, values.dtype, values.numel()))
            self._memory.acknowledge(found, self._index)

        return [letters], copy_in

    def _lent(self, values: torch.Tensor, again: bool = False) -> SegmentHandle | None:
        """A ticket to where ``values`` lies, if peers can read it there now."""
        if self.homes is None or self._peers is None:
            return None
        found = self.homes.lend(values, self._direct.peers(), self._peers, again=again)
        if found is None:
            return None
        segment, offset = found
        return SegmentHandle(os.getpid(), segment.descriptor, segment.generation, offset)

    def _copied(self, values: torch.Tensor) -> SegmentHandle:
        """A ticket to a copy of ``values``."""
        segment = self._memory.acquire(values.numel() * values.element_size(), self._direct.peers())
        segment.payload(values.dtype, values.numel()).copy_(values)
        return SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0)

    def _start(self, owner: int, part_bytes: int, gap: int) -> int:
        """Where this rank's part begins behind the ticket's place."""
        return self._index * part_bytes if gap == 0 else place(self._index, owner) * gap

    def _acknowledge(self, tickets: Iterable[SegmentHandle]) -> None:
        for ticket in tickets:
            self._memory.acknowledge(ticket, self._index)


def place(reader: int, owner: int) -> int:
    """Which part of ``owner``'s segment is for ``reader``: parts lie in the order of readers."""
    return reader - (reader > owner)


class MessageHandleExchange:
    """Tickets as messages of the process group, where ranks cannot wait in shared memory."""

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks
        self._index = ranks.index(dist.get_rank())

    def post(self, ticket: SegmentHandle | None, tag: int, sources: Iterable[int]) -> MessageHandles:
        arrived = {peer: torch.empty(len(SegmentHandle._fields), dtype=torch.int64) for peer in sources}
        works: Works = [dist.irecv(arrived[peer], self._ranks[peer], group=self._group, tag=tag) for peer in arrived]
        if ticket is not None:
            values = ticket.to_tensor()
            peers = (rank for index, rank in enumerate(self._ranks) if index != self._index)
            works += [dist.isend(values, rank, group=self._group, tag=tag) for rank in peers]
        return MessageHandles(works, arrived)


class MessageHandles:
    """Tickets that come as messages."""

    def __init__(self, works: Works, arrived: dict[int, torch.Tensor]) -> None:
        self._works = works
        self._arrived = arrived
        self.tickets: dict[int, SegmentHandle] = {}

    def wait(self, timeout: timedelta) -> None:
        for work in self._works:
            work.wait(timeout)
        self.tickets = {peer: SegmentHandle.from_tensor(values) for peer, values in self._arrived.items()}


def _nothing() -> None:
    return None


# This rank's buffers on one axis: tensors that peers read where they lie, and whether they have read them.


class Buffers:
    """Makes buffers and waits for their readers. ``homes``: where they live; None where peers read nothing in place."""

    def __init__(self, axis: str, watch: Watchdog) -> None:
        self.homes: SharedTensorPool | None = None
        self._name = f"the readers of a buffer over {axis}"
        self._watch = watch

    def make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros."""
        if self.homes is None or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.homes.empty(numel, dtype)

    def wait_for_readers(self, tensor: torch.Tensor) -> None:
        """Returns when no peer reads any more where ``tensor`` lies. Raises MeshError where one does not come to read."""
        home = self._home_of(tensor)
        if home is not None and not home.settled:
            self._watch.heartbeat.waiting(self._name, self._watch.ranks)
            try:
                home.settle(self._watch.timeout)
            except RuntimeError as error:
                self._watch.fail(self._name, error)
            self._watch.heartbeat.leave()

    def has_readers(self, tensor: torch.Tensor) -> bool:
        """Say whether :meth:`wait_for_readers` would wait."""
        home = self._home_of(tensor)
        return home is not None and not home.settled

    def _home_of(self, tensor: torch.Tensor) -> SharedTensor | None:
        return None if self.homes is None or not self._watch.on_host(tensor) else self.homes.find(tensor)
