"""Collectives between ranks of one host through memory that they share: one copy out, one read in, and a message of 32 bytes.

    reduce_scatter   each rank copies what others need into its segment and sends tickets; the owner of a part adds the parts where they lie
    all_gather       each rank copies its shard out once; peers copy it in
    broadcast        the source copies its tensor out once; peers copy it in

Price per rank, n elements on N ranks: writes n (N-1)/N (reduce_scatter) or n/N (all_gather) elements and reads n (N-1)/N; no payload passes through
a socket. Messages carry tickets only, so a peer that ended is noticed as on any connection. Sums are made in rank order, as in direct exchange.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.mesh.shared_memory import SharedMemory, Ticket
from zero_trial.mesh.transport import DirectTransport, Finish, Received, Works, sum_in_order

WORTH_BYTES = 1 << 15  # below this a message with the payload in it is as fast


def _nothing() -> None:
    return None


class SharedTransport:
    """Exchange on one axis whose ranks are all on this host. Small payloads go through ``direct``."""

    def __init__(
        self, group: Any, ranks: tuple[int, ...], index: int, memory: SharedMemory, direct: DirectTransport
    ) -> None:
        self._group = group
        self._ranks = ranks
        self._index = index
        self._memory = memory
        self._direct = direct

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.reduce_scatter(full, out, tag)
        parts = full.view(len(self._ranks), -1)
        peers, part_bytes = self._direct.peers(), parts[0].numel() * full.element_size()
        segment = self._memory.acquire(part_bytes * len(peers), peers)
        for place, peer in enumerate(peers):
            segment.payload(full.dtype, parts[peer].numel(), place * part_bytes).copy_(parts[peer])
        tickets = {
            peer: self._ticket(segment.descriptor, segment.generation, place * part_bytes)
            for place, peer in enumerate(peers)
        }
        works, arrived = self._exchange(tickets, tag)

        def add_in_rank_order() -> Received:
            found = {peer: Ticket.from_tensor(values) for peer, values in arrived.items()}
            received = {
                peer: self._memory.read(ticket, full.dtype, parts[peer].numel()) for peer, ticket in found.items()
            }
            own = parts[self._index]
            sum_in_order([received.get(index, own) for index in range(len(self._ranks))], out)
            return Received(received, lambda: self._acknowledge(found.values()))

        return works, add_in_rank_order

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        if full.numel() * full.element_size() < WORTH_BYTES:
            return self._direct.all_gather(full, shard, tag)
        parts, peers = full.view(len(self._ranks), -1), self._direct.peers()
        segment = self._memory.acquire(shard.numel() * shard.element_size(), peers)
        segment.payload(shard.dtype, shard.numel()).copy_(shard)
        ticket = self._ticket(segment.descriptor, segment.generation, 0)
        works, arrived = self._exchange(dict.fromkeys(peers, ticket), tag)
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

        def copy_in() -> None:
            for peer, values in arrived.items():
                found = Ticket.from_tensor(values)
                parts[peer].copy_(self._memory.read(found, full.dtype, parts[peer].numel()))
                self._memory.acknowledge(found, self._index)

        return works, copy_in

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> tuple[Works, Finish]:
        """``values`` (flat) of axis index ``source`` into everyone else's. The source writes n elements, a peer reads n."""
        if self._index == source:
            peers = self._direct.peers()
            segment = self._memory.acquire(values.numel() * values.element_size(), peers)
            segment.payload(values.dtype, values.numel()).copy_(values)
            ticket = self._ticket(segment.descriptor, segment.generation, 0).to_tensor()
            return [dist.isend(ticket, self._ranks[peer], group=self._group, tag=tag) for peer in peers], _nothing
        arrived = torch.empty(4, dtype=torch.int64)

        def copy_in() -> None:
            found = Ticket.from_tensor(arrived)
            values.copy_(self._memory.read(found, values.dtype, values.numel()))
            self._memory.acknowledge(found, self._index)

        return [dist.irecv(arrived, self._ranks[source], group=self._group, tag=tag)], copy_in

    def _ticket(self, descriptor: int, generation: int, offset: int) -> Ticket:
        return Ticket(os.getpid(), descriptor, generation, offset)

    def _exchange(self, tickets: dict[int, Ticket], tag: int) -> tuple[Works, dict[int, torch.Tensor]]:
        """Sends each peer its ticket and expects one from each."""
        arrived = {peer: torch.empty(4, dtype=torch.int64) for peer in tickets}
        works: Works = [dist.irecv(arrived[peer], self._ranks[peer], group=self._group, tag=tag) for peer in tickets]
        for peer, ticket in tickets.items():
            works.append(dist.isend(ticket.to_tensor(), self._ranks[peer], group=self._group, tag=tag))
        return works, arrived

    def _acknowledge(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._memory.acknowledge(ticket, self._index)
