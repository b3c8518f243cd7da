"""Collectives along one axis, as this rank calls them: counted, bounded in time, by the transport that the tensors can take.

Every verb is collective over the axis: all its ranks must call it in the same order. An axis of one rank
communicates nothing and costs nothing.

    CommCounters   how many elements and bytes each kind of collective moved
    Pending        a collective under way, which owns its buffers until it has been waited for
    Message        a tensor on its way between two ranks
    AxisComm       the verbs

A verb is written once, in AxisComm; a :class:`~zero_trial.comm.backends.Transport` moves the tensors,
and a :class:`~zero_trial.comm.control.ControlChannel` the control values.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zero_trial.comm.backends import (
    DirectTransport,
    Finish,
    NativeTransport,
    Received,
    Sum,
    Transport,
    Works,
    moves_host_tensors,
    sum_in_order,
)
from zero_trial.comm.control import ControlChannel
from zero_trial.comm.health import Heartbeat, Watchdog
from zero_trial.comm.shm.lending import MessageHandleExchange, SharedHandleExchange, SharedTensorPool, SharedTransport
from zero_trial.comm.shm.ring import RingChannels, SharedControlBlock
from zero_trial.comm.shm.segments import MappingRefused, SharedMemory
from zero_trial.errors import MeshError

# --- what was moved ------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Calls, elements and bytes of one kind of collective on one axis."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


class CommCounters:
    """Sums of traffic since the last :meth:`reset`, by (kind, axis).

    An entry counts what this rank has to send in the best algorithm, so that the formulas of the ZeRO
    paper can be compared with it directly. With n elements in the whole buffer and N ranks on the axis:

        reduce_scatter, all_gather    n (N-1)/N
        all_reduce                  2 n (N-1)/N
        broadcast                     n          on the source, 0 elsewhere
        send                          n
    """

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
        """Return the sum over all axes of the given kinds (all kinds if none is given)."""
        out = Traffic()
        for (kind, _), entry in self._table.items():
            if (not kinds or kind in kinds) and entry.elements >= min_elements:
                out.calls += entry.calls
                out.elements += entry.elements
                out.bytes += entry.bytes
        return out

    def table(self) -> dict[str, dict[str, int]]:
        """Return plain numbers for a report: ``{"reduce_scatter/shard": {"calls": 3, ...}}``."""
        return {f"{kind}/{axis}": vars(entry).copy() for (kind, axis), entry in sorted(self._table.items())}

    def reset(self) -> None:
        self._table.clear()


# --- what is under way ---------------------------------------------------------------------------------------------

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
        fence: Callable[[torch.Tensor], None] | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        """``works``, waited for by ``watch``, and then ``finish()``, make the result; ``fence(source)`` waits for the input's readers.

        ``watch`` is None where there are no works to wait for. ``on_host``: see :meth:`Watchdog.wait`.
        """
        self._watch = watch
        self._label = label
        self._works = works
        self._finish = finish
        self._source = source
        self._fence = fence
        self._on_host = on_host
        self._next: Pending | None = None
        self.received = Received({})  # what peers contributed to a sum on CPU, if it was asked for

    def start_next(self, *, keep: bool = False) -> None:
        """Finish the part under way and start what follows it (the gather half of an all-reduce), without waiting for that.

        A later call after a MeshError waits again, or raises again.
        """
        finish = self._finish
        if finish is None:
            return
        if self._watch is not None:
            for work in self._works:
                self._watch.wait(work, self._label, on_host=self._on_host)
        self._works, self._finish = [], self._refuse  # an error from here on may leave half of the result
        result = finish() if self._watch is None else self._finished(self._watch, finish)
        self._finish = None
        if isinstance(result, Pending):
            self._next = result
        elif isinstance(result, Received):
            self.received = result
            if not keep:
                result.release()

    def wait_result(self, *, keep: bool = False) -> None:
        """Return when the result is there; the input may not be overwritten yet.

        ``keep``: ``received`` stays readable until it is released.
        """
        self.start_next(keep=keep)
        if self._next is not None:
            self._next.wait_result()
            self._next = None

    def wait(self) -> None:
        """Return when the result is there, and input and output are the caller's again. May be called again."""
        self.wait_result()
        source, self._source = self._source, None
        if source is not None and self._fence is not None:
            self._fence(source)

    def _refuse(self) -> NoReturn:
        raise MeshError("this collective has failed before", where=self._label, fix="Look for its first error, above.")

    def _finished(self, watch: Watchdog, finish: Finish) -> object:
        try:
            return finish()
        except MappingRefused as error:
            watch.fail(self._label, error)
        except OSError as error:  # memory of a peer that has ended
            watch.fail(self._label, RuntimeError(f"closed: {error}"))


# A collective of one rank: the result is there.
DONE = Pending(None, "", [], None)


def wait_all(pendings: Sequence[Pending]) -> None:
    """Wait for several collectives: start the second halves of all, wait for the results of all, and then for their readers."""
    for pending in pendings:
        pending.start_next()
    for pending in pendings:
        pending.wait_result()
    for pending in pendings:
        pending.wait()


class Message:
    """A tensor on its way between two ranks. It owns the buffer until :meth:`wait` returns; before that it may not be touched."""

    def __init__(self, watch: Watchdog, work: Any, name: str, values: torch.Tensor, among: tuple[int, int]) -> None:
        self._watch = watch
        self._work = work
        self._name = name
        self._among = among
        self.values = values

    @property
    def done(self) -> bool:
        """It has been received, or sent. Does not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """Return the tensor, once it has been received or sent. May be called again. Raises MeshError, naming the other rank, if it is not."""
        if self._work is not None:
            self._watch.wait(self._work, self._name, self._among, on_host=self._watch.on_host(self.values))
            self._work = None
        return self.values


# --- the verbs -----------------------------------------------------------------------------------------------------


class AxisComm:
    """One axis of the mesh as this rank sees it: its size, this rank's index on it, and the collectives along it.

    Args:
        name: of the axis, in counters and errors.
        ranks: global ranks on the axis, by axis index.
        index: this rank's.
        group: their process group; None for an axis of one rank.
        timeout: seconds that a wait may take; then a MeshError names this rank, the operation, the step and the missing rank.
        add: makes the sums of tensors on the host.
        transport: moves all tensors. Without it a device's go by the backend's collectives, and the
            host's by direct exchange until the ranks share memory (:meth:`share_memory`).
        control: carries control values, instead of one over ``group``.
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
        *,
        transport: Transport | None = None,
        control: ControlChannel | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self.group = group
        self.counters = counters
        self.heartbeat = heartbeat
        self.add = add
        self.watch = Watchdog(heartbeat, ranks, timeout)
        self.takes_host_tensors = group is None or moves_host_tensors(group)
        device = torch.device("cpu") if self.takes_host_tensors else torch.device("cuda", torch.cuda.current_device())
        self._direct = DirectTransport(group, ranks, index, add)
        self._host_transport: Transport = transport or self._direct
        self._device_transport: Transport = transport or NativeTransport(group)
        self._control = control or ControlChannel(name, group, self.watch, device)
        self._channels: RingChannels | None = None
        self._sequence = 0
        # (from index, to index) -> a group for messages that way alone; the axis's own group carries all others.
        self.directions: dict[tuple[int, int], Any] = {}

    def share_memory(
        self,
        memory: SharedMemory,
        control: SharedControlBlock | None,
        exchange: SharedHandleExchange | None,
        tensors: SharedTensorPool | None = None,
    ) -> None:
        """From now on move tensors on the host through ``memory``, and control values through ``control``: all ranks are on this host.

        ``exchange`` carries handles to them, by default as messages; ``tensors`` holds buffers that peers
        read in place. All ranks must call it alike.
        """
        handles = exchange if exchange is not None else MessageHandleExchange(self.group, self.ranks)
        self._host_transport = SharedTransport(self.index, self.size, memory, handles, self._direct, self.add, tensors)
        self._control.shared = control

    @property
    def transport(self) -> str:
        """How tensors on the host travel here: ``shared memory`` or ``gloo``."""
        return self._host_transport.name

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        return self.watch.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.watch.timeout = seconds

    @property
    def control_device(self) -> torch.device:
        """Where control values must be for :meth:`all_reduce_small`."""
        return self._control.device

    def on_host(self, values: torch.Tensor) -> bool:
        """Say whether a collective of ``values`` is done when its wait returns, so that reading them costs nothing.

        On a device it is only ordered before what is launched there next.
        """
        return self.watch.on_host(values)

    # --- buffers that peers may read in place -------------------------------------------------------------------

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of zeros for what this rank will often send. Local.

        Where CPU ranks share memory, peers read it in place: a collective on it, or on any part of it,
        saves the copy out. It is an ordinary tensor but for its storage, which cannot be resized, and
        which processes forked later share instead of getting a copy.
        """
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._host_transport.buffer(numel, dtype)

    def reads_in_place(self, device: torch.device) -> bool:
        """Say whether peers read this rank's :meth:`buffer` s on ``device`` in place."""
        return device.type == "cpu" and self._host_transport.reads_in_place

    def has_readers(self, tensor: torch.Tensor) -> bool:
        """Say whether peers still read there, so that :meth:`wait_for_readers` would wait."""
        return self.watch.on_host(tensor) and self._host_transport.has_readers(tensor)

    def wait_for_readers(self, tensor: torch.Tensor) -> None:
        """The reader fence: return when no peer reads the buffer that holds ``tensor``, which may then be overwritten.

        Returns at once for any other tensor. Needs the peers to wait for the collective that it was given
        to; raises MeshError where they do not.
        """
        if not self.has_readers(tensor):
            return
        name = f"the readers of a buffer over {self.name}"
        self.heartbeat.waiting(name, self.ranks)
        try:
            self._host_transport.wait_for_readers(tensor, self.timeout)
        except RuntimeError as error:
            self.watch.fail(name, error)
        self.heartbeat.leave()

    # --- tensors ------------------------------------------------------------------------------------------------

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Pending:
        """Sum ``full`` (n,) over the axis; ``out`` (n/N,) gets this rank's part and may be that part of ``full``. Moves n (N-1)/N elements."""
        if self.size == 1:
            return _copied(full, out)
        self._count("reduce_scatter", full.numel(), full.element_size())
        return self._start("reduce_scatter", full, out, label)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, *, lend: bool = True) -> Pending:
        """Put every rank's ``shard`` (n/N,) in rank order into ``full`` (n,); ``shard`` may be this rank's part of ``full``. Moves n (N-1)/N.

        ``lend=False``: peers read no buffer in place here, so that ``shard`` may be written as soon as the result is there. Costs a copy.
        """
        if self.size == 1:
            return _copied(shard, full)
        self._count("all_gather", full.numel(), full.element_size())
        return self._start("all_gather", full, shard, label, lend=lend)

    def all_reduce(self, full: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        """Sum ``full`` (n,), n divisible by N, in place: a reduce-scatter and an all-gather, with their bits. Moves 2n (N-1)/N.

        ``look(sum, contributions)`` is called with this rank's part of the sum and, on CPU, with what each
        peer (by axis index) put in, before the sum is passed on, which overwrites all of them.
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
            return self._start("all_gather", full, own, label, again=True)

        return self._start("all_reduce", full, own, label, then=pass_on)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Overwrite ``tensor`` (any dtype, any strides) with that of axis index ``source``, and wait."""
        if self.size == 1 or tensor.numel() == 0:
            return
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension is one row in memory
        self.counters.add("broadcast", self.name, tensor.numel() if self.index == source else 0, tensor.element_size())
        values = tensor.contiguous()
        raw = values.view(-1).view(torch.uint8)  # as bytes: backends know few dtypes
        if self._transport_of(raw).broadcasts and not self._control.fits(raw):
            self._start("broadcast", raw, raw, label, source=source).wait()
        else:
            self._control.broadcast(raw, label, source)
        if values is not tensor:
            tensor.copy_(values)

    def _start(
        self,
        kind: str,
        full: torch.Tensor,
        part: torch.Tensor,
        label: str,
        then: Callable[[Received | None], Pending] | None = None,
        *,
        again: bool = False,
        lend: bool = True,
        source: int = 0,
    ) -> Pending:
        """Start a collective; ``then`` starts the one that follows when the first is done, and is that one (``again``)."""
        name = f"{kind}({label}) over {self.name}"
        self.heartbeat.enter(name, self.ranks)
        self._sequence += 1
        tag = message_tag(self._sequence, name)
        transport = self._transport_of(full)
        try:
            if kind == "all_gather":
                works, finish = transport.all_gather(full, part, tag, again=again, lend=lend)
            elif kind == "broadcast":
                works, finish = transport.broadcast(full, source, tag)
            else:
                works, finish = transport.reduce_scatter(full, part, tag)
        except (RuntimeError, OSError) as error:
            self.watch.fail(name, error)
        self.heartbeat.leave()
        sent = part if kind == "all_gather" else full
        fence, on_host = self.wait_for_readers, self.watch.on_host(full)
        if then is None:
            return Pending(self.watch, name, works, finish, sent, fence, on_host=on_host)

        def go_on() -> Pending:
            result = finish()
            return then(result if isinstance(result, Received) else None)

        return Pending(self.watch, name, works, go_on, sent, fence, on_host=on_host)

    def _transport_of(self, values: torch.Tensor) -> Transport:
        return self._host_transport if self.watch.on_host(values) else self._device_transport

    def _count(self, kind: str, numel: int, itemsize: int) -> None:
        """Of ``numel`` elements each rank sends those of the others."""
        self.counters.add(kind, self.name, numel * (self.size - 1) // self.size, itemsize)

    # --- control values -----------------------------------------------------------------------------------------

    def all_reduce_small(self, values: torch.Tensor, label: str, op: str = "sum") -> None:
        """Replace a few numbers by their sum, max or min, and wait. Sums are in rank order in shared memory; gloo's ring is fixed, too."""
        if self.size > 1:
            self.counters.add("all_reduce", self.name, values.numel(), values.element_size())
            self._control.all_reduce(values, label, op)

    def gather_json(self, value: Any, label: str) -> list[Any]:
        """Return every rank's ``value`` (anything that JSON holds), in rank order, on every rank. For rare, small things."""
        if self.size == 1:
            return [value]
        self.counters.add("all_reduce", self.name, self.size, 8)  # the lengths
        return self._control.gather_json(value, label, self.index)

    def barrier(self, label: str) -> None:
        """Return when every rank of the axis has called it."""
        if self.size > 1:
            self.all_reduce_small(torch.zeros(1, device=self.control_device), label)

    # --- messages between two ranks -----------------------------------------------------------------------------

    def use_ring_channels(self, channels: RingChannels | None) -> None:
        """From now on send messages on the host through ``channels``, or through the backend again (None). All ranks must call it alike."""
        self._channels = channels

    def send(self, values: torch.Tensor, to: int, label: str, tag: int, *, counted: bool = True) -> Message:
        """Start to send ``values`` (n,), contiguous, to axis index ``to``, which must :meth:`receive` as many of the same dtype and ``tag``.

        Messages between two ranks are received in the order of the sends. Moves n elements;
        ``counted=False`` leaves the counting to the caller.
        """
        if counted:
            self.counters.add("send", self.name, values.numel(), values.element_size())
        return self._start_message("send", values, to, label, tag)

    def receive(self, values: torch.Tensor, source: int, label: str, tag: int) -> Message:
        """Ask for what axis index ``source`` sends next; ``values`` (n,) is filled when :meth:`Message.wait` returns."""
        return self._start_message("receive", values, source, label, tag)

    def _start_message(self, kind: str, values: torch.Tensor, peer: int, label: str, tag: int) -> Message:
        sends = kind == "send"
        name = f"{kind}({label}) {'to' if sends else 'from'} rank {self.ranks[peer]}"
        among = (self.ranks[self.index], self.ranks[peer])
        try:
            if self._channels is not None and self.watch.on_host(values):
                move = self._channels.send if sends else self._channels.receive
                work: Any = move(values, peer, tag)
            else:
                verb = dist.isend if sends else dist.irecv
                way = (self.index, peer) if sends else (peer, self.index)
                work = verb(values, self.ranks[peer], group=self.directions.get(way, self.group), tag=tag)
        except (RuntimeError, OSError) as error:
            self.watch.fail(name, error, among)
        return Message(self.watch, work, name, values, among)


def message_tag(sequence: int, name: str) -> int:
    """Return the mark of one collective's messages: 20 bits of its number and 11 of its name.

    Ranks that disagree about what comes next then wait for each other in vain, and get a MeshError,
    instead of summing what does not belong together.
    """
    return (sequence % (1 << 20)) << 11 | zlib.crc32(name.encode()) & 0x7FF


def _copied(source: torch.Tensor, target: torch.Tensor) -> Pending:
    """The collective of one rank. Compared by storage, because tensors of a dry run have no addresses."""
    same = source.untyped_storage()._cdata == target.untyped_storage()._cdata
    if not same or source.storage_offset() != target.storage_offset():
        target.copy_(source)
    return DONE
