"""Collectives between ranks of one host through memory that they share: one copy out, one read in, and a ticket of 32 bytes.

    reduce_scatter   each rank copies what others need into its segment and tells where; the owner of a part adds the parts where they lie
    all_gather       each rank copies its shard out once; peers copy it in
    broadcast        the source copies its tensor out once; peers copy it in

Price per rank, n elements on N ranks: writes n (N-1)/N (reduce_scatter) or n/N (all_gather) elements and reads n (N-1)/N; no payload passes through
a socket. A peer that ended is noticed by whoever waits for its ticket. Sums are made in rank order, as in direct exchange.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_trial.mesh.shared_memory import Segment, SharedMemory, Ticket
from zero_trial.mesh.transport import DirectTransport, Finish, Received, Works, sum_in_order

WORTH_BYTES = 1  # from the first byte on: a message with the payload in it costs two to three times the processor time, also at 16 bytes


class Tickets(Protocol):
    """The tickets of one collective, on their way; they are there after :meth:`wait`."""

    tickets: dict[int, Ticket]

    def wait(self, timeout: timedelta) -> None: ...


class Mail(Protocol):
    """How ranks tell each other where payloads lie: in shared memory (:class:`SharedMail`) or by message."""

    def post(self, ticket: Ticket | None, tag: int, sources: Iterable[int]) -> Tickets: ...


class SharedTransport:
    """Exchange on one axis whose ranks are all on this host. What has no elements goes through ``direct``."""

    def __init__(self, index: int, size: int, memory: SharedMemory, mail: Mail, direct: DirectTransport) -> None:
        self._index = index
        self._size = size
        self._memory = memory
        self._mail = mail
        self._direct = direct

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.reduce_scatter(full, out, tag)
        parts = full.view(self._size, -1)
        peers, part_bytes = self._direct.peers(), parts[0].numel() * full.element_size()
        segment = self._memory.acquire(part_bytes * len(peers), peers)
        for peer in peers:
            payload = segment.payload(full.dtype, parts[peer].numel(), place(peer, self._index) * part_bytes)
            payload.copy_(parts[peer])
        letters = self._mail.post(self._ticket(segment), tag, peers)

        def add_in_rank_order() -> Received:
            found = letters.tickets
            received = {
                peer: self._memory.read(ticket, full.dtype, parts[peer].numel(), place(self._index, peer) * part_bytes)
                for peer, ticket in found.items()
            }
            own = parts[self._index]
            sum_in_order([received.get(index, own) for index in range(self._size)], out)
            return Received(received, lambda: self._acknowledge(found.values()))

        return [letters], add_in_rank_order

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.all_gather(full, shard, tag)
        parts, peers = full.view(self._size, -1), self._direct.peers()
        letters = self._mail.post(self._ticket(self._filled(shard, peers)), tag, peers)
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

        def copy_in() -> None:
            for peer, found in letters.tickets.items():
                parts[peer].copy_(self._memory.read(found, full.dtype, parts[peer].numel()))
                self._memory.acknowledge(found, self._index)

        return [letters], copy_in

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> tuple[Works, Finish]:
        """``values`` (flat) of axis index ``source`` into everyone else's. The source writes n elements, a peer reads n."""
        if self._index == source:
            return [self._mail.post(self._ticket(self._filled(values, self._direct.peers())), tag, [])], _nothing
        letters = self._mail.post(None, tag, [source])

        def copy_in() -> None:
            found = letters.tickets[source]
            values.copy_(self._memory.read(found, values.dtype, values.numel()))
            self._memory.acknowledge(found, self._index)

        return [letters], copy_in

    def _filled(self, values: torch.Tensor, readers: list[int]) -> Segment:
        segment = self._memory.acquire(values.numel() * values.element_size(), readers)
        segment.payload(values.dtype, values.numel()).copy_(values)
        return segment

    def _ticket(self, segment: Segment) -> Ticket:
        return Ticket(os.getpid(), segment.descriptor, segment.generation, 0)

    def _acknowledge(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._memory.acknowledge(ticket, self._index)


def place(reader: int, owner: int) -> int:
    """Which part of ``owner``'s segment is for ``reader``: parts lie in the order of readers."""
    return reader - (reader > owner)


class MessageMail:
    """Tickets as messages of the process group, where ranks cannot wait in shared memory."""

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks
        self._index = ranks.index(dist.get_rank())

    def post(self, ticket: Ticket | None, tag: int, sources: Iterable[int]) -> MessageTickets:
        arrived = {peer: torch.empty(4, dtype=torch.int64) for peer in sources}
        works: Works = [dist.irecv(arrived[peer], self._ranks[peer], group=self._group, tag=tag) for peer in arrived]
        if ticket is not None:
            values = ticket.to_tensor()
            peers = (rank for index, rank in enumerate(self._ranks) if index != self._index)
            works += [dist.isend(values, rank, group=self._group, tag=tag) for rank in peers]
        return MessageTickets(works, arrived)


class MessageTickets:
    """Tickets that come as messages."""

    def __init__(self, works: Works, arrived: dict[int, torch.Tensor]) -> None:
        self._works = works
        self._arrived = arrived
        self.tickets: dict[int, Ticket] = {}

    def wait(self, timeout: timedelta) -> None:
        for work in self._works:
            work.wait(timeout)
        self.tickets = {peer: Ticket.from_tensor(values) for peer, values in self._arrived.items()}


def _nothing() -> None:
    return None
