"""Collectives between ranks of one host, through arenas that they map (:mod:`.arena`).

A collective is a few phases. A rank posts its phase, waits until its peers have posted theirs,
and reads them in place:

    reduce_scatter   arrived   | add the peers' parts    | read
    all_gather       arrived   | copy the peers' shards  | read
    all_reduce       arrived   | add the peers' parts    | summed | copy the peers' sums | read
    broadcast        arrived   | copy the source's       | read
    all_to_all       arrived   | copy the peers' parts   | read

After the last phase no peer reads this rank's tensor any more: it may be written or freed. A tensor
of the arena is read where it is; any other one is copied into the arena first. Each rank decides
this for itself, because the posted offset says where its tensor is.

A rank goes on with all of its collectives while it waits for one, and at each start. Ranks may thus
wait in different orders, and a rank that is ahead is seldom held up by a peer that has yet to read.

Price per rank, n elements on N ranks: reads n (N-1)/N and writes as many sums or copies; a tensor
that is not in the arena costs a copy of it. Sums are made in rank order, as in direct exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from mmap import mmap

import torch

from zero_trial.comm.backends import Counts, Look, Steps, Sum, Transport, peers_from
from zero_trial.comm.shm.arena import Arena
from zero_trial.comm.shm.peers import ELSEWHERE, PeerProcesses
from zero_trial.comm.waits import UnderWay, Works

# --- the calls of one axis ------------------------------------------------------------------------

SLOTS = 1024
_SLOT = 4  # numbers: mark, tag, offset, unused
_PHASES = 4  # marks of one call
ARRIVED, SUMMED, READ = 1, 2, 3


class CallBoard:
    """The calls of one axis: each rank has a ring of numbered slots that it alone writes.

    All ranks of the axis start their collectives in one order (also those of several engines on the
    same ranks), so number k is the same collective everywhere. A slot's mark is k * 4 + phase, and
    only grows. A rank starts call k + SLOTS when its call k is over, that is when all ranks have
    read in it.
    """

    NBYTES = SLOTS * _SLOT * 8

    def __init__(self, own: memoryview, others: Mapping[int, memoryview], peers: PeerProcesses) -> None:
        self.own = own.cast("q")
        self.others = {index: block.cast("q") for index, block in others.items()}
        self.peers = peers
        self.number = 0


class Call:
    """One collective as this rank sees it, with what peers read of it, which must live as long.

    It is waited for like a work of torch.distributed: until all peers have reached the phase that
    this rank has reached.
    """

    def __init__(self, board: CallBoard, tag: int, sent: torch.Tensor, offset: int) -> None:
        board.number += 1
        self._board, self._tag, self.sent = board, tag, sent
        self._first = board.number * _PHASES
        self.at = board.number % SLOTS * _SLOT
        self._phase = 0
        board.own[self.at + 1], board.own[self.at + 2] = tag, offset

    def reach(self, phase: int) -> Works:
        """Let the peers know that this rank has reached ``phase``; return what to wait for until
        they have reached it, too."""
        self._phase = phase
        self._board.own[self.at] = self._first + phase  # last: a reader that sees the mark sees the rest
        return [self]

    def is_completed(self) -> bool:
        for numbers in self._board.others.values():
            if numbers[self.at] < self._first + self._phase:
                return False
            if self._phase == ARRIVED and numbers[self.at + 1] != self._tag:
                return False
        return True

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError where a peer has ended (``closed``), is late (``timed out``), or is
        in another collective."""
        mark = self._first + self._phase
        for index, numbers in self._board.others.items():
            self._board.peers.wait_for(index, numbers, self.at, mark, timeout.total_seconds())
            if self._phase == ARRIVED and numbers[self.at + 1] != self._tag:
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")


# --- the collectives ------------------------------------------------------------------------------


class SharedTransport(Transport):
    """Collectives on one axis whose ranks are all on this host. ``add`` makes the sums."""

    name = "shared memory"
    broadcasts = True
    shares_memory = True

    def __init__(
        self,
        index: int,
        size: int,
        arena: Arena,
        others: Mapping[int, mmap],
        board: CallBoard,
        add: Sum,
        under_way: UnderWay,
    ) -> None:
        self._index = index
        self._size = size
        self._arena = arena
        self._others = others
        self._board = board
        self._add = add
        self.under_way: UnderWay = under_way
        self._peers = tuple(peers_from(index, size))

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, look: Look | None = None) -> Steps:
        call = self._post(full, tag)
        yield call.reach(ARRIVED)
        self._sum(call, full, out, look)
        yield call.reach(READ)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        call, parts = self._post(shard, tag), full.view(self._size, -1)
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        yield call.reach(ARRIVED)
        for peer in self._peers:
            parts[peer].copy_(self._read(call, peer, full.dtype, shard.numel()))
        yield call.reach(READ)

    def all_reduce(self, full: torch.Tensor, own: torch.Tensor, tag: int, look: Look | None = None) -> Steps:
        call, parts = self._post(full, tag), full.view(self._size, -1)
        yield call.reach(ARRIVED)
        self._sum(call, full, own, look)
        if call.sent is not full:
            call.sent.view(self._size, -1)[self._index].copy_(own)
        # The sum of a part is where its owner has put it. Peers still read their own parts of
        # this rank's tensor, so that none of those is overwritten before all have summed.
        yield call.reach(SUMMED)
        for peer in self._peers:
            parts[peer].copy_(self._read(call, peer, full.dtype, own.numel(), peer * own.nbytes))
        yield call.reach(READ)

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> Steps:
        call = self._post(values if self._index == source else values[:0], tag)
        yield call.reach(ARRIVED)
        if self._index != source:
            values.copy_(self._read(call, source, values.dtype, values.numel()))
        yield call.reach(READ)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, counts: Counts, tag: int) -> Steps:
        call, parts = self._post(sent, tag), received.split([row[self._index] for row in counts])
        yield call.reach(ARRIVED)
        for peer in self._peers:
            start = sum(counts[peer][: self._index]) * sent.element_size()
            parts[peer].copy_(self._read(call, peer, sent.dtype, parts[peer].numel(), start))
        yield call.reach(READ)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arena.tensor(numel, dtype)

    def trim(self) -> None:
        self._arena.trim()

    def _post(self, values: torch.Tensor, tag: int) -> Call:
        """Start the next call of the axis, in which peers read ``values``, or a copy of them. Its
        slot must be free: the call that had it is over."""
        offset = self._arena.offset_of(values)
        if offset is None:
            values = self._arena.tensor(values.numel(), values.dtype).copy_(values)
            offset = self._arena.offset_of(values) or 0
        board = self._board
        last = board.number + 1 - SLOTS
        if last > 0:
            for numbers in (board.own, *board.others.values()):
                while numbers[last % SLOTS * _SLOT] < last * _PHASES + READ:
                    self.under_way.wait_for_oldest()
        return Call(board, tag, values, offset)

    def _sum(self, call: Call, full: torch.Tensor, out: torch.Tensor, look: Look | None) -> None:
        """Add this rank's part of all ranks' tensors into ``out``."""
        contributions = {}
        for peer in self._peers:
            contributions[peer] = self._read(call, peer, full.dtype, out.numel(), self._index * out.nbytes)
        parts = contributions | {self._index: full.view(self._size, -1)[self._index]}
        self._add(list(map(parts.__getitem__, range(self._size))), out)
        if look is not None:
            look(out, contributions)

    def _read(self, call: Call, peer: int, dtype: torch.dtype, numel: int, start: int = 0) -> torch.Tensor:
        """Return ``numel`` elements of the tensor of ``peer`` from ``start`` bytes on, in place."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        offset = self._board.others[peer][call.at + 2] + start
        return torch.frombuffer(self._others[peer], dtype=dtype, count=numel, offset=offset)
