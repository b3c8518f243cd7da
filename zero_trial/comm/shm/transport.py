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

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch

from zero_trial.comm.backends import Counts, Look, Steps, Sum, Transport, peers_from
from zero_trial.comm.shm.arena import Arena, PeerArena
from zero_trial.comm.shm.peers import ELSEWHERE, PeerProcesses
from zero_trial.comm.waits import UnderWay

# --- the calls of one axis ------------------------------------------------------------------------

SLOTS = 1024
_SLOT = 4  # numbers: mark, tag, offset, unused
_PHASES = 4  # marks of one call
ARRIVED, SUMMED, READ = 1, 2, 3


class CallBoard:
    """The calls of one axis: each rank has a ring of numbered slots that it alone writes.

    All ranks of the axis start their collectives in one order (also those of several engines on the
    same ranks), so number k is the same collective everywhere. A slot's mark is k * 4 + phase, and
    only grows. A rank starts call k + SLOTS when its call k is over, that is when all peers have
    read its slot.
    """

    NBYTES = SLOTS * _SLOT * 8

    def __init__(self, own: memoryview, others: Mapping[int, memoryview], peers: PeerProcesses) -> None:
        self.own = own.cast("q")
        self.others = {index: block.cast("q") for index, block in others.items()}
        self.peers = peers
        self.number = 0
        self.open: set[int] = set()  # the numbers of calls that are not over

    def post(self, tag: int, sent: torch.Tensor, offset: int) -> Call:
        """Start the next call, with ``sent`` at ``offset`` of this rank's arena."""
        self.number += 1
        call = Call(self, self.number, tag, sent)
        self.own[call.at + 1], self.own[call.at + 2] = tag, offset
        call.reach(ARRIVED)  # last: a reader that sees the mark sees the rest
        self.open.add(self.number)
        return call


class Call:
    """One collective, as this rank sees it."""

    def __init__(self, board: CallBoard, number: int, tag: int, sent: torch.Tensor) -> None:
        self._board = board
        self._number = number
        self._tag = tag
        self.sent = sent  # what peers read, which must live as long
        self.at = number % SLOTS * _SLOT

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        """Note that the call is over, or has failed: its slot can be used again."""
        self._board.open.discard(self._number)

    def reach(self, phase: int) -> None:
        """Let the peers know that this rank has reached ``phase``."""
        self._board.own[self.at] = self._number * _PHASES + phase

    def until(self, phase: int, sources: Iterable[int] | None = None) -> list[PhaseWait]:
        """Return what to wait for until ``sources`` (default: all peers) have reached ``phase``."""
        return [PhaseWait(self, phase, tuple(self._board.others if sources is None else sources))]

    def offset_of(self, peer: int) -> int:
        """Return where the tensor of ``peer`` is in its arena."""
        return self._board.others[peer][self.at + 2]

    def has_reached(self, phase: int, sources: Iterable[int]) -> bool:
        """Return whether ``sources`` have reached ``phase`` of the same collective."""
        mark = self._number * _PHASES + phase
        for index in sources:
            numbers = self._board.others[index]
            if numbers[self.at] < mark or (phase == ARRIVED and numbers[self.at + 1] != self._tag):
                return False
        return True

    def wait(self, phase: int, sources: Iterable[int], timeout: float) -> None:
        """Return when ``sources`` have reached ``phase``. Raises RuntimeError where one has ended
        (``closed``), is late (``timed out``), or is in another collective."""
        mark = self._number * _PHASES + phase
        for index in sources:
            numbers = self._board.others[index]
            self._board.peers.wait_for(index, numbers, self.at, mark, timeout)
            if phase == ARRIVED and numbers[self.at + 1] != self._tag:
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")


class PhaseWait:
    """A phase that peers have yet to reach; waited for like a work of torch.distributed."""

    def __init__(self, call: Call, phase: int, sources: tuple[int, ...]) -> None:
        self._call = call
        self._phase = phase
        self._sources = sources

    def is_completed(self) -> bool:
        return self._call.has_reached(self._phase, self._sources)

    def wait(self, timeout: timedelta) -> None:
        self._call.wait(self._phase, self._sources, timeout.total_seconds())


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
        others: Mapping[int, PeerArena],
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
        with self._post(full, tag) as call:
            yield call.until(ARRIVED)
            self._sum(call, full, out, look)
            call.reach(READ)
            yield call.until(READ)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        with self._post(shard, tag) as call:
            parts = full.view(self._size, -1)
            own = parts[self._index]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            yield call.until(ARRIVED)
            for peer in self._peers:
                parts[peer].copy_(self._read(call, peer, full.dtype, shard.numel()))
            call.reach(READ)
            yield call.until(READ)

    def all_reduce(self, full: torch.Tensor, own: torch.Tensor, tag: int, look: Look | None = None) -> Steps:
        with self._post(full, tag) as call:
            yield call.until(ARRIVED)
            self._sum(call, full, own, look)
            if call.sent is not full:
                call.sent.view(self._size, -1)[self._index].copy_(own)
            # The sum of a part is where its owner has put it. Peers still read their own parts of
            # this rank's tensor, so that none of those is overwritten before all have summed.
            call.reach(SUMMED)
            yield call.until(SUMMED)
            parts = full.view(self._size, -1)
            for peer in self._peers:
                parts[peer].copy_(self._read(call, peer, full.dtype, own.numel(), peer * own.nbytes))
            call.reach(READ)
            yield call.until(READ)

    def broadcast(self, values: torch.Tensor, source: int, tag: int) -> Steps:
        if self._index == source:
            with self._post(values, tag) as call:
                yield call.until(READ)
            return
        with self._start(tag, values, 0) as call:
            yield call.until(ARRIVED, [source])
            values.copy_(self._read(call, source, values.dtype, values.numel()))
            call.reach(READ)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, counts: Counts, tag: int) -> Steps:
        with self._post(sent, tag) as call:
            parts = received.split([row[self._index] for row in counts])
            yield call.until(ARRIVED)
            for peer in self._peers:
                start = sum(counts[peer][: self._index]) * sent.element_size()
                parts[peer].copy_(self._read(call, peer, sent.dtype, parts[peer].numel(), start))
            call.reach(READ)
            yield call.until(READ)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arena.tensor(numel, dtype)

    def trim(self) -> None:
        self._arena.trim()

    def _post(self, values: torch.Tensor, tag: int) -> Call:
        """Start a call in which peers read ``values``, or a copy of them."""
        offset = self._arena.offset_of(values)
        if offset is None:
            values = self._arena.tensor(values.numel(), values.dtype).copy_(values)
            offset = self._arena.offset_of(values) or 0
        return self._start(tag, values, offset)

    def _start(self, tag: int, sent: torch.Tensor, offset: int) -> Call:
        while self._board.open and min(self._board.open) <= self._board.number + 1 - SLOTS:
            self.under_way.wait_for_oldest()
        return self._board.post(tag, sent, offset)

    def _sum(self, call: Call, full: torch.Tensor, out: torch.Tensor, look: Look | None) -> None:
        """Add this rank's part of all ranks' tensors into ``out``."""
        own, start = full.view(self._size, -1)[self._index], self._index * out.nbytes
        contributions = {peer: self._read(call, peer, full.dtype, out.numel(), start) for peer in self._peers}
        self._add([contributions.get(index, own) for index in range(self._size)], out)
        if look is not None:
            look(out, contributions)

    def _read(self, call: Call, peer: int, dtype: torch.dtype, numel: int, start: int = 0) -> torch.Tensor:
        return self._others[peer].tensor(call.offset_of(peer) + start, numel, dtype)


def parts_of(block: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Cut ``block`` into parts of ``sizes`` bytes."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]
