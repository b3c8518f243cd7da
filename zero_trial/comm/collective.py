"""How much each collective moved: calls, elements and bytes, by kind and axis.

An entry counts what this rank has to send in the best algorithm, so that the formulas of the ZeRO paper can be compared with it directly. With n
elements in the whole buffer and N ranks on the axis:

    reduce_scatter, all_gather    n (N-1)/N
    all_reduce                  2 n (N-1)/N
    broadcast                     n          on the source, 0 elsewhere
    send                          n
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zero_trial.comm.backends import (
    DirectTransport,
    Finish,
    Message,
    MessageRoute,
    NativeTransport,
    PointToPoint,
    Received,
    Sum,
    Transport,
    Works,
    moves_host_tensors,
    sum_in_order,
)
from zero_trial.comm.control import ControlChannel
from zero_trial.comm.health import Heartbeat, Watchdog
from zero_trial.comm.shm.lending import (
    Buffers,
    HandleExchange,
    MessageHandleExchange,
    SharedHandleExchange,
    SharedTensorPool,
    SharedTransport,
)
from zero_trial.comm.shm.ring import SharedControlBlock
from zero_trial.comm.shm.segments import MappingRefused, SharedMemory
from zero_trial.errors import MeshError


@dataclass
class Traffic:
    """Calls, elements and bytes of one kind of collective on one axis."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


class CommCounters:
    """Sums of traffic since the last :meth:`reset`, by (kind, axis)."""

    def __init__(self) -> None:
        self._table: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def add(self, kind: str, axis: str, elements: int, itemsize: int) -> None:
        entry = self._table[kind, axis]
        entry.calls += 1
        entry.elements += elements
        entry.bytes += elements * itemsize

    def get(self, kind: str, axis: str) -> Traffic:
        return self._table.get((kind, axis), Traffic())

    def total(self, *kinds: str, min_elements: int = 0) -> Traffic:
        """The sum over all axes of the given kinds (all kinds if none is given)."""
        out = Traffic()
        for (kind, _), entry in self._table.items():
            if (not kinds or kind in kinds) and entry.elements >= min_elements:
                out.calls += entry.calls
                out.elements += entry.elements
                out.bytes += entry.bytes
        return out

    def table(self) -> dict[str, dict[str, int]]:
        """Plain numbers for a report: ``{"reduce_scatter/shard": {"calls": 3, ...}}``."""
        return {f"{kind}/{axis}": vars(entry).copy() for (kind, axis), entry in sorted(self._table.items())}

    def reset(self) -> None:
        self._table.clear()


# A collective under way, as a value that owns its buffers.


# Sees this rank's part of a sum and what peers put in, by axis index, before it is passed on.
Look = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], None]


class Pending:
    """A collective under way. It owns the buffers until :meth:`wait` returns; before that neither input nor output may be touched.

    On CPU, peers may read the input in place (:meth:`AxisComm.buffer`). So there are two ends:

        wait_result   the result is there; peers may still be reading the input
        wait          and they have read it: it may be overwritten

    ``wait`` thus needs the other ranks to come as far as ``wait_result`` of the same collective. This
    cannot deadlock as long as ranks wait in the order in which they started, or call
    :meth:`wait_result` on everything before they call ``wait`` on any (:func:`wait_all`). A caller
    that cannot promise that calls ``wait_result``, and :meth:`AxisComm.wait_for_readers` before it
    overwrites the input, at a point that every rank passes after the result is there.
    """

    def __init__(
        self,
        watch: Watchdog | None,
        label: str,
        works: Works,
        finish: Finish | None,
        source: torch.Tensor | None = None,
        settle: Callable[[torch.Tensor], None] | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        """``works``, waited for by ``watch``, and then ``finish()``, make the result; ``settle(source)`` waits for those who read the input.

        ``watch`` is None where there are no works to wait for. ``on_host``: as :meth:`Watch.wait` has it.
        """
        self._watch = watch
        self._on_host = on_host
        self._label = label
        self._works = works
        self._finish = finish
        self._source = source
        self._settle = settle
        self._next: Pending | None = None
        self.received = Received({})  # what peers contributed to a sum on CPU, if it was asked for

    def start_next(self, *, keep: bool = False) -> None:
        """Finishes the part under way and starts what follows it (the gather half of an all-reduce), without waiting for that.

        A MeshError is no end: who asks again waits again, or is told so again.
        """
        finish = self._finish
        if finish is None:
            return
        if self._watch is not None:
            for work in self._works:
                self._watch.wait(work, self._label, on_host=self._on_host)
        self._works, self._finish = [], self._refuse  # what breaks off here may have made half of the result
        result = finish() if self._watch is None else self._finished(self._watch, finish)
        self._finish = None
        if isinstance(result, Pending):
            self._next = result
        elif isinstance(result, Received):
            self.received = result
            if not keep:
                result.release()

    def wait_result(self, *, keep: bool = False) -> None:
        """Returns when the result is there; the input may not be overwritten yet. ``keep``: ``received`` stays readable until it is released."""
        self.start_next(keep=keep)
        if self._next is not None:
            self._next.wait_result()
            self._next = None

    def wait(self) -> None:
        """Returns when the result is there and input and output are the caller's again. May be called again."""
        self.wait_result()
        source, self._source = self._source, None
        if source is not None and self._settle is not None:
            self._settle(source)

    def _refuse(self) -> NoReturn:
        raise MeshError("this collective has failed before", where=self._label, fix="Look for its first error, above.")

    def _finished(self, watch: Watchdog, finish: Finish) -> object:
        try:
            return finish()
        except MappingRefused as error:
            watch.fail(self._label, error)
        except OSError as error:  # memory of a peer that is gone
            watch.fail(self._label, RuntimeError(f"closed: {error}"))


# A collective of one rank: the result is there.
DONE = Pending(None, "", [], None)


def wait_all(pendings: Sequence[Pending]) -> None:
    """Waits for several collectives: starts the second halves of all, arrives at all, and then settles them."""
    for pending in pendings:
        pending.start_next()
    for pending in pendings:
        pending.wait_result()
    for pending in pendings:
        pending.wait()


# The collectives of tensors on one axis: which transport takes one, and the tag by which ranks know that they mean the same.


class Collectives:
    """Starts collectives of this rank, axis index ``index``, on one axis. ``add`` makes the sums of CPU tensors.

    These go by direct exchange until memory is shared.
    """

    def __init__(self, axis: str, index: int, group: Any, watch: Watchdog, buffers: Buffers, add: Sum) -> None:
        self.shared: SharedTransport | None = None
        self._axis = axis
        self._index = index
        self._watch = watch
        self._buffers = buffers
        self._sequence = 0
        self._add = add
        self._native = NativeTransport(group)
        self._direct = DirectTransport(group, watch.ranks, index, add)

    def share(self, memory: SharedMemory, mail: HandleExchange, homes: SharedTensorPool | None) -> None:
        """From now on CPU tensors go through ``memory``."""
        size = len(self._watch.ranks)
        self.shared = SharedTransport(self._index, size, memory, mail, self._direct, self._add, homes)
        self._buffers.homes = self.shared.homes

    def start(
        self,
        kind: str,
        full: torch.Tensor,
        part: torch.Tensor,
        label: str,
        then: Callable[[Received | None], Pending] | None = None,
        again: bool = False,
        lend: bool = True,
    ) -> Pending:
        """Starts a collective; ``then`` starts the one that follows when the first is done, and is that one (``again``)."""
        name, tag = self._enter(kind, label)
        on_host = self._watch.on_host(full)
        transport: Transport = (self.shared or self._direct) if on_host else self._native
        try:
            if kind == "all_gather":
                works, finish = transport.all_gather(full, part, tag, again, lend)
            else:
                works, finish = transport.reduce_scatter(full, part, tag)
        except (RuntimeError, OSError) as error:
            self._watch.fail(name, error)
        self._watch.heartbeat.leave()
        source = part if kind == "all_gather" else full
        if then is None:
            return Pending(self._watch, name, works, finish, source, self._buffers.wait_for_readers, on_host=on_host)

        def go_on() -> Pending:
            result = finish()
            return then(result if isinstance(result, Received) else None)

        return Pending(self._watch, name, works, go_on, source, self._buffers.wait_for_readers, on_host=on_host)

    def broadcast(self, shared: SharedTransport, raw: torch.Tensor, label: str, source: int) -> None:
        """``raw`` (flat) of axis index ``source`` into everyone else's, through ``shared`` memory, waited for."""
        name, tag = self._enter("broadcast", label)
        try:
            works, finish = shared.broadcast(raw, source, tag)
        except (RuntimeError, OSError) as error:
            self._watch.fail(name, error)
        Pending(self._watch, name, works, finish, raw, self._buffers.wait_for_readers).wait()
        self._watch.heartbeat.leave()

    def _enter(self, kind: str, label: str) -> tuple[str, int]:
        name = f"{kind}({label}) over {self._axis}"
        self._watch.heartbeat.enter(name, self._watch.ranks)
        self._sequence += 1
        return name, message_tag(self._sequence, name)


def message_tag(sequence: int, name: str) -> int:
    """Marks the messages of one collective: 20 bits of its number and 11 of its name.

    Ranks that disagree about what comes next then wait for each other in vain, and are told so, instead of summing what does not belong together.
    """
    return (sequence % (1 << 20)) << 11 | zlib.crc32(name.encode()) & 0x7FF


# Collectives along one axis, as this rank calls them: counted, bounded in time, by whichever way the tensors can go.
#
# Every verb is collective over the axis: all its ranks must call it in the same order. An axis of one rank communicates nothing and costs nothing.
#
#     what is under way        :mod:`zero_trial.comm.collective`        tensors that peers read in place   :mod:`zero_trial.comm.shm.lending`
#     how a tensor travels     :mod:`zero_trial.comm.collective`    a few numbers                      :mod:`zero_trial.comm.control`
#     how a wait ends          :mod:`zero_trial.comm.health`          between two ranks                  :mod:`zero_trial.comm.backends`


class AxisComm:
    """One axis of the mesh as this rank sees it: its size, this rank's index on it, and the collectives along it.

    ``timeout`` (seconds) bounds every wait; then a MeshError names this rank, the operation, the step and the rank that is missing.
    ``add`` makes the sums of CPU tensors.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        index: int,
        group: Any,
        counters: CommCounters,
        heartbeat: Heartbeat,
        timeout: float,
        add: Sum = sum_in_order,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self.group = group
        self.counters = counters
        self.heartbeat = heartbeat
        self.add = add
        self.takes_host_tensors = group is None or moves_host_tensors(group)
        self.watch = Watchdog(heartbeat, ranks, timeout)
        device = torch.device("cpu") if self.takes_host_tensors else torch.device("cuda", torch.cuda.current_device())
        self._small = ControlChannel(name, group, self.watch, device)
        self._buffers = Buffers(name, self.watch)
        self._collectives = Collectives(name, index, group, self.watch, self._buffers, add)
        self._messages = PointToPoint(index, group, self.watch)

    def share_memory(
        self,
        memory: SharedMemory,
        control: SharedControlBlock | None,
        mail: SharedHandleExchange | None,
        homes: SharedTensorPool | None = None,
    ) -> None:
        """From now on CPU tensors go through ``memory``, announced by ``mail`` (or messages), and small values through ``control`` (or gloo):
        every rank of the axis is on this host. ``homes``: where :meth:`buffer` puts tensors. All ranks must do so alike."""
        self._collectives.share(
            memory, mail if mail is not None else MessageHandleExchange(self.group, self.ranks), homes
        )
        self._small.shared = control

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros for what this rank will often send. Local.

        Where CPU ranks share memory, peers read it in place: a collective on it, or on any part of it, saves the copy out. It is an ordinary
        tensor but for its storage, which cannot be resized, and which processes forked later share instead of getting a copy.
        """
        return self._buffers.make(numel, dtype, device)

    def reads_in_place(self, device: torch.device) -> bool:
        """Whether peers read this rank's :meth:`buffer` s on ``device`` where they lie."""
        return device.type == "cpu" and self._buffers.homes is not None

    def on_host(self, values: torch.Tensor) -> bool:
        """Whether a collective of ``values`` is done when its wait returns, so that reading them costs nothing. On a device it is only
        ordered before what is launched there next."""
        return self.watch.on_host(values)

    def wait_for_readers(self, tensor: torch.Tensor) -> None:
        """Returns when no peer reads any more from the buffer in which ``tensor`` lies: it may be overwritten. At once for any other tensor.

        Needs the peers to arrive at the collective that it was given to. Raises MeshError where they do not.
        """
        self._buffers.wait_for_readers(tensor)

    def has_readers(self, tensor: torch.Tensor) -> bool:
        """Say whether peers still read there, so that :meth:`wait_for_readers` would wait."""
        return self._buffers.has_readers(tensor)

    @property
    def directions(self) -> dict[tuple[int, int], Any]:
        """(from index, to index) -> a group for messages that way alone; the axis's own group for all others."""
        return self._messages.directions

    def use_ring_channels(self, lanes: MessageRoute) -> None:
        """From now on CPU messages between two ranks go through ``lanes``. All ranks must do so alike."""
        self._messages.lanes = lanes

    def drop_ring_channels(self) -> None:
        """Messages go through the backend again. All ranks must do so alike."""
        self._messages.lanes = None

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        return self.watch.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.watch.timeout = seconds

    @property
    def transport(self) -> str:
        """How CPU tensors travel here: ``shared memory`` or ``gloo``."""
        return "gloo" if self._collectives.shared is None else "shared memory"

    @property
    def control_device(self) -> torch.device:
        """Where small control values must be for :meth:`all_reduce_small`."""
        return self._small.device

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Pending:
        """Sums ``full`` (n,) over the axis; ``out`` (n/N,) gets this rank's part and may be that part of ``full``. Moves n (N-1)/N elements."""
        if self.size == 1:
            return _copied(full, out)
        self._count("reduce_scatter", full.numel(), full.element_size())
        return self._collectives.start("reduce_scatter", full, out, label)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, *, lend: bool = True) -> Pending:
        """Puts every rank's ``shard`` (n/N,) in rank order into ``full`` (n,); ``shard`` may be this rank's part of ``full``. Moves n (N-1)/N.

        ``lend=False``: peers read no buffer in place here, so that ``shard`` may be written as soon as the result has arrived. Costs a copy.
        """
        if self.size == 1:
            return _copied(shard, full)
        self._count("all_gather", full.numel(), full.element_size())
        return self._collectives.start("all_gather", full, shard, label, lend=lend)

    def all_reduce(self, full: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        """Sums ``full`` (n,), n divisible by N, in place: a reduce-scatter and an all-gather, so that its bits are theirs. Moves 2n (N-1)/N.

        ``look(sum, contributions)`` is called with this rank's part of the sum and, on CPU, with what each peer (by axis index) put in, before the
        sum is passed on, which overwrites all of them.
        """
        if self.size == 1:
            return DONE
        own = full.view(self.size, -1)[self.index]
        self._count("all_reduce", 2 * full.numel(), full.element_size())

        def pass_on(received: Received | None) -> Pending:
            if look is not None:
                look(own, received if received is not None else {})
            if received is not None:
                received.release()
            return self._collectives.start("all_gather", full, own, label, again=True)

        return self._collectives.start("all_reduce", full, own, label, then=pass_on)

    def all_reduce_small(self, values: torch.Tensor, label: str, op: str = "sum") -> None:
        """Sum, max or min of a few numbers in place, waited for. Sums are made in rank order in shared memory; gloo's ring is fixed, too."""
        if self.size > 1:
            self.counters.add("all_reduce", self.name, values.numel(), values.element_size())
            self._small.all_reduce(values, label, op)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Overwrites ``tensor`` (any dtype, any strides) with that of axis index ``source``, waited for."""
        if self.size == 1 or tensor.numel() == 0:
            return
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension is one row in memory
        self.counters.add("broadcast", self.name, tensor.numel() if self.index == source else 0, tensor.element_size())
        values = tensor.contiguous()
        raw = values.view(-1).view(torch.uint8)  # as bytes: backends know few dtypes
        shared = self._collectives.shared if self.watch.on_host(raw) and not self._small.fits(raw) else None
        if shared is not None:
            self._collectives.broadcast(shared, raw, label, source)
        else:
            self._small.broadcast(raw, label, source)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def gather_json(self, value: Any, label: str) -> list[Any]:
        """Every rank's ``value`` (anything that JSON holds), in rank order, on every rank. For rare, small things."""
        if self.size == 1:
            return [value]
        self.counters.add("all_reduce", self.name, self.size, 8)  # the lengths
        return self._small.gather_json(value, label, self.index)

    def barrier(self, label: str) -> None:
        """Returns when every rank of the axis has arrived."""
        if self.size > 1:
            self.all_reduce_small(torch.zeros(1, device=self.control_device), label)

    def send(self, values: torch.Tensor, to: int, label: str, tag: int, *, counted: bool = True) -> Message:
        """Starts to send ``values`` (n,), contiguous, to axis index ``to``, which must :meth:`receive` as many of the same dtype and ``tag``.

        Nobody waits for it before :meth:`Message.wait`. Messages between two ranks arrive in the order of the sends. Moves n elements;
        ``counted=False`` leaves the counting to the caller.
        """
        if counted:
            self.counters.add("send", self.name, values.numel(), values.element_size())
        return self._messages.start("send", values, to, label, tag)

    def receive(self, values: torch.Tensor, source: int, label: str, tag: int) -> Message:
        """Asks for what axis index ``source`` sends next; ``values`` (n,) is filled when :meth:`Message.wait` returns."""
        return self._messages.start("receive", values, source, label, tag)

    def _count(self, kind: str, numel: int, itemsize: int) -> None:
        """Of ``numel`` elements each rank sends those of the others."""
        self.counters.add(kind, self.name, numel * (self.size - 1) // self.size, itemsize)


def _copied(source: torch.Tensor, target: torch.Tensor) -> Pending:
    """The collective of one rank."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    return DONE
