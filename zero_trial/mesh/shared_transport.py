"""Collectives between ranks of one host through memory that they share: one read in, a ticket, and a copy out where a tensor is not at home.

    reduce_scatter   each rank tells where its tensor lies; the owner of a part adds the parts where they lie
    all_gather       each rank tells where its shard lies; peers copy it in
    broadcast        the source tells where its tensor lies; peers copy it in

A tensor lies where its peers can read it if it is in a home (:mod:`zero_trial.mesh.shared_homes`); what they need of any other is copied into a
segment first. Every rank decides for itself: the ticket says which.

Price per rank, n elements on N ranks: reads n (N-1)/N; writes as many sums or copies, and out of ordinary memory n (N-1)/N (reduce_scatter) or n/N
(all_gather) elements more; no payload passes through a socket. A peer that ended is noticed by whoever waits for its ticket, or for it to have
read. Sums are made in rank order, as in direct exchange.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_trial.mesh.shared_homes import Homes
from zero_trial.mesh.shared_mail import SharedMail
from zero_trial.mesh.shared_memory import SharedMemory, Ticket
from zero_trial.mesh.sums import Sum
from zero_trial.mesh.transport import DirectTransport, Finish, Received, Works

WORTH_BYTES = 1  # from the first byte on: a message with the payload in it costs two to three times the processor time, also at 16 bytes


class Tickets(Protocol):
    """The tickets of one collective, on their way; they are there after :meth:`wait`."""

    tickets: dict[int, Ticket]

    def wait(self, timeout: timedelta) -> None: ...


class Mail(Protocol):
    """How ranks tell each other where payloads lie: in shared memory (:class:`SharedMail`) or by message."""

    def post(self, ticket: Ticket | None, tag: int, sources: Iterable[int]) -> Tickets: ...


class SharedTransport:
    """Exchange on one axis whose ranks are all on this host. What has no elements goes through ``direct``.

    ``add`` makes the sums. ``homes``: where tensors can live that are read in place; None where ranks cannot wait for one another in shared memory.
    """

    def __init__(
        self,
        index: int,
        size: int,
        memory: SharedMemory,
        mail: Mail,
        direct: DirectTransport,
        add: Sum,
        homes: Homes | None = None,
    ) -> None:
        self._index = index
        self._size = size
        self._memory = memory
        self._mail = mail
        self._direct = direct
        self._add = add
        self._peers = mail.peers if isinstance(mail, SharedMail) else None
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
            ticket = Ticket(os.getpid(), segment.descriptor, segment.generation, 0, gap=part_bytes)
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

    def _lent(self, values: torch.Tensor, again: bool = False) -> Ticket | None:
        """A ticket to where ``values`` lies, if peers can read it there now."""
        if self.homes is None or self._peers is None:
            return None
        found = self.homes.lend(values, self._direct.peers(), self._peers, again=again)
        if found is None:
            return None
        segment, offset = found
        return Ticket(os.getpid(), segment.descriptor, segment.generation, offset)

    def _copied(self, values: torch.Tensor) -> Ticket:
        """A ticket to a copy of ``values``."""
        segment = self._memory.acquire(values.numel() * values.element_size(), self._direct.peers())
        segment.payload(values.dtype, values.numel()).copy_(values)
        return Ticket(os.getpid(), segment.descriptor, segment.generation, 0)

    def _start(self, owner: int, part_bytes: int, gap: int) -> int:
        """Where this rank's part begins behind the ticket's place."""
        return self._index * part_bytes if gap == 0 else place(self._index, owner) * gap

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
        arrived = {peer: torch.empty(len(Ticket._fields), dtype=torch.int64) for peer in sources}
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
