"""The sum of what the ranks have put in: one order, and one rounding of 16-bit values, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_trial.comm.health import Watchdog

# ``out = parts[0] + parts[1] + ...`` from left to right; 16-bit parts are added in fp32 and rounded once. ``out`` may be one of them.
Sum = Callable[[Sequence[torch.Tensor], torch.Tensor], None]


CHUNK = 1 << 17  # elements: what torch adds in between stays in a core's cache, and costs no new pages


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The :data:`Sum` of flat tensors in plain torch. Reads and writes what it has so far once for every part after the second."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # one rounding in any dtype
        return
    if out.numel() <= CHUNK:
        _add(parts, out)
        return
    for *chunks, target in zip(*(part.split(CHUNK) for part in (*parts, out)), strict=True):
        _add(chunks, target)


def _add(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    total = parts[0].float() if out.dtype.itemsize == 2 else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


# How the bytes of one collective move between the ranks of one axis: natively (NCCL), or by direct exchange (gloo on CPU).
#
# Direct exchange sends every peer exactly the part that it needs and adds what arrives in rank order. Against gloo's own collectives,
# two ranks and 11 M fp32 elements on loopback: reduce-scatter 18 ms of CPU instead of 44, all-gather 9.5 instead of 39; and because
# the order of the sum is fixed, the bits do not depend on which message came first, nor on whether the result is a shard or the whole.


Works = list[Any]


Finish = Callable[[], Any]


class Received(dict[int, torch.Tensor]):
    """What each peer (by axis index) contributed to a reduce-scatter, readable until :meth:`release`."""

    def __init__(self, parts: dict[int, torch.Tensor], release: Callable[[], None] = lambda: None) -> None:
        super().__init__(parts)
        self._release = release

    def release(self) -> None:
        """Lets go of the contributions; their memory is the sender's again. Once."""
        self.clear()
        release, self._release = self._release, lambda: None
        release()


class Transport(Protocol):
    """Starts collectives on one axis. Each verb returns the works to wait for and what remains to be done after them."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]: ...

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        """``again``: the second half of an all-reduce, whose first half had the same source. ``lend``: peers may read ``shard`` where it lies."""
        ...


def moves_host_tensors(group: Any) -> bool:
    """Whether ``group`` (None: the world) has a backend for tensors on the host. ``cpu:gloo,cuda:nccl`` has one, ``nccl`` has none."""
    return "cpu:" in dist.get_backend_config(group)


class NativeTransport:
    """The backend's own tensor collectives (NCCL; gloo for tensors that direct exchange cannot reach)."""

    def __init__(self, group: Any) -> None:
        self._group = group
        # torch 2.13 renamed these two; the old names warn there and the new ones do not exist before.
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        return [self._scatter(out, full, group=self._group, async_op=True)], _nothing

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        return [self._gather(full, shard, group=self._group, async_op=True)], _nothing


class DirectTransport:
    """Point-to-point exchange between all ranks of an axis.

    Price per rank and collective of n elements on N ranks: sends and receives n (N-1)/N; reduce_scatter holds n (N-1)/N elements of received
    contributions until its sum is made, by ``add``.
    """

    def __init__(self, group: Any, ranks: tuple[int, ...], index: int, add: Sum) -> None:
        self._group = group
        self._ranks = ranks
        self._index = index
        self._add = add
        size = len(ranks)
        self._peers = [(index + distance) % size for distance in range(1, size)]

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Works, Finish]:
        parts = full.view(len(self._ranks), -1)
        received: dict[int, torch.Tensor] = {}
        works: Works = []
        for peer in self.peers():
            received[peer] = torch.empty_like(parts[peer])
            works.append(dist.irecv(received[peer], self._ranks[peer], group=self._group, tag=tag))
        for peer in self.peers():
            works.append(dist.isend(parts[peer], self._ranks[peer], group=self._group, tag=tag))

        def add_in_rank_order() -> Received:
            own = parts[self._index]
            self._add([received.get(index, own) for index in range(len(self._ranks))], out)
            return Received(received)

        return works, add_in_rank_order

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, again: bool = False, lend: bool = True
    ) -> tuple[Works, Finish]:
        parts = full.view(len(self._ranks), -1)
        works: Works = []
        for peer in self.peers():
            works.append(dist.irecv(parts[peer], self._ranks[peer], group=self._group, tag=tag))
        for peer in self.peers():
            works.append(dist.isend(shard, self._ranks[peer], group=self._group, tag=tag))
        own = parts[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return works, _nothing

    def peers(self) -> list[int]:
        """The other ranks, each rank starting with its right-hand neighbour, so that not all send to rank 0 first."""
        return self._peers


def _nothing() -> None:
    return None


# Messages between two ranks of an axis: by lanes through shared memory where there are some, else by the backend.


class MessageRoute(Protocol):
    """Another way for messages between two ranks than the backend's; see :mod:`zero_trial.comm.shm.ring`."""

    def send(self, values: torch.Tensor, to: int, tag: int) -> Any: ...

    def receive(self, values: torch.Tensor, source: int, tag: int) -> Any: ...


class Message:
    """A tensor on its way between two ranks. It owns the buffer until :meth:`wait` returns; before that nobody may touch it."""

    def __init__(self, watch: Watchdog, work: Any, name: str, values: torch.Tensor, among: tuple[int, int]) -> None:
        self._watch = watch
        self._work = work
        self._name = name
        self._among = among
        self.values = values

    @property
    def done(self) -> bool:
        """It has arrived or left. Does not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """The tensor, once it has arrived or left. May be called again. Raises MeshError, naming the other rank, where that does not happen."""
        if self._work is not None:
            self._watch.wait(self._work, self._name, self._among, on_host=self._watch.on_host(self.values))
            self._work = None
        return self.values


class PointToPoint:
    """How this rank, axis index ``index``, sends and receives on one axis."""

    def __init__(self, index: int, group: Any, watch: Watchdog) -> None:
        self.directions: dict[tuple[int, int], Any] = {}  # (from, to) -> a group for that way alone
        self.lanes: MessageRoute | None = None
        self._index = index
        self._group = group
        self._watch = watch

    def start(self, kind: str, values: torch.Tensor, peer: int, label: str, tag: int) -> Message:
        """``kind``: ``send`` to, or ``receive`` from, axis index ``peer``."""
        ranks = self._watch.ranks
        name = f"{kind}({label}) {'to' if kind == 'send' else 'from'} rank {ranks[peer]}"
        among = (ranks[self._index], ranks[peer])
        try:
            work = self._work(kind, values, peer, tag)
        except (RuntimeError, OSError) as error:
            self._watch.fail(name, error, among)
        return Message(self._watch, work, name, values, among)

    def _work(self, kind: str, values: torch.Tensor, peer: int, tag: int) -> Any:
        if self.lanes is not None and self._watch.on_host(values):
            return self.lanes.send(values, peer, tag) if kind == "send" else self.lanes.receive(values, peer, tag)
        verb = dist.isend if kind == "send" else dist.irecv
        way = (self._index, peer) if kind == "send" else (peer, self._index)
        return verb(values, self._watch.ranks[peer], group=self.directions.get(way, self._group), tag=tag)
