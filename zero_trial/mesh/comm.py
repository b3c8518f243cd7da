"""Collectives along one axis: the only caller of torch.distributed, and the place where traffic is counted and silence becomes an error.

Every verb is collective over the axis: all its ranks must call it in the same order. An axis of one rank communicates nothing and costs nothing.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from zero_trial.mesh.board import Board
from zero_trial.mesh.counters import CommCounters
from zero_trial.mesh.diagnosis import explain
from zero_trial.mesh.shared_control import CAPACITY, SharedControl
from zero_trial.mesh.shared_homes import Home, Homes
from zero_trial.mesh.shared_mail import SharedMail
from zero_trial.mesh.shared_memory import SharedMemory
from zero_trial.mesh.shared_transport import MessageMail, SharedTransport
from zero_trial.mesh.transport import DirectTransport, Finish, NativeTransport, Received, Transport, Works

# Sees this rank's part of a sum and what peers put in, by axis index, before it is passed on.
Look = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], None]


class Lanes(Protocol):
    """Another way for messages between two ranks than the backend's; see :mod:`zero_trial.mesh.lanes`."""

    def send(self, values: torch.Tensor, to: int, tag: int) -> Any: ...

    def receive(self, values: torch.Tensor, source: int, tag: int) -> Any: ...


class Pending:
    """A collective under way. It owns the buffers until :meth:`wait` returns; before that neither input nor output may be touched.

    On CPU peers may read the input where it lies (:meth:`AxisComm.buffer`). So there are two ends:

        arrive   the result is there; peers may still be reading the input
        wait     and they have read it: it may be overwritten

    ``wait`` thus needs the other ranks to come as far as ``arrive`` for the same collective. That is no deadlock as long as ranks wait for
    what they have started in the same order, or where they :meth:`arrive` at all of it before they settle any (:func:`wait_all`). Who cannot
    promise that arrives, and calls :meth:`AxisComm.settle` when it is about to overwrite the input, at a point that all ranks pass after the
    collective's arrival.
    """

    def __init__(
        self, comm: AxisComm | None, label: str, works: Works, finish: Finish | None, source: torch.Tensor | None = None
    ) -> None:
        self._comm = comm
        self._label = label
        self._works = works
        self._finish = finish
        self._source = source
        self._next: Pending | None = None
        self.received = Received({})  # what peers contributed to a sum on CPU, if it was asked for

    def turn(self, *, keep: bool = False) -> None:
        """Finishes the part under way and starts what follows it (the gather half of an all-reduce), without waiting for that."""
        if self._finish is None or self._comm is None:
            return
        for work in self._works:
            self._comm._await(work, self._label)
        finish, self._finish, self._works = self._finish, None, []
        try:
            result = finish()
        except OSError as error:  # memory of a peer that is gone
            self._comm._fail(self._label, RuntimeError(f"closed: {error}"))
        if isinstance(result, Pending):
            self._next = result
        elif isinstance(result, Received):
            self.received = result
            if not keep:
                result.release()

    def arrive(self, *, keep: bool = False) -> None:
        """Returns when the result is there; the input may not be overwritten yet. ``keep``: ``received`` stays readable until it is released."""
        self.turn(keep=keep)
        if self._next is not None:
            self._next.arrive()
            self._next = None

    def wait(self) -> None:
        """Returns when the result is there and input and output are the caller's again. May be called again."""
        self.arrive()
        source, self._source = self._source, None
        if source is not None and self._comm is not None:
            self._comm.settle(source)


class Message:
    """A tensor on its way between two ranks. It owns the buffer until :meth:`wait` returns; before that nobody may touch it."""

    def __init__(self, comm: AxisComm, work: Any, name: str, values: torch.Tensor, peer: int) -> None:
        self._comm = comm
        self._work = work
        self._name = name
        self._peer = peer
        self.values = values

    @property
    def done(self) -> bool:
        """It has arrived or left. Does not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """The tensor, once it has arrived or left. May be called again. Raises MeshError, naming the other rank, where that does not happen."""
        if self._work is not None:
            comm = self._comm
            comm._await(self._work, self._name, (comm.ranks[comm.index], comm.ranks[self._peer]))
            self._work = None
        return self.values


class AxisComm:
    """One axis of the mesh as this rank sees it: its size, this rank's index on it, and the collectives along it.

    ``timeout`` (seconds) bounds every wait; then a MeshError names this rank, the operation, the step and the rank that is missing.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        index: int,
        group: Any,
        counters: CommCounters,
        board: Board,
        timeout: float,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self.group = group
        self.counters = counters
        self.board = board
        self.timeout = timeout
        self._sequence = 0
        self._native = NativeTransport(group)
        self._direct = DirectTransport(group, ranks, index)
        self._on_host: Transport = self._direct  # between CPU tensors; shared memory where all ranks are on one host
        # Where small control values live so that this group's backend can move them.
        on_cpu = group is None or "gloo" in str(dist.get_backend(group))
        self._control = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        self._small: SharedControl | None = None  # how small CPU values travel where all ranks are on one host
        self.on_cpu = on_cpu
        self.directions: dict[
            tuple[int, int], Any
        ] = {}  # (from index, to index) -> a group for messages that way alone
        self._lanes: Lanes | None = None  # how messages between two ranks travel, if not through the backend

    def share_memory(
        self, memory: SharedMemory, control: SharedControl | None, mail: SharedMail | None, homes: Homes | None = None
    ) -> None:
        """From now on CPU tensors go through ``memory``, announced by ``mail`` (or messages), and small values through ``control`` (or gloo):
        every rank of the axis is on this host. ``homes``: where :meth:`buffer` puts tensors. All ranks must do so alike."""
        tickets = mail if mail is not None else MessageMail(self.group, self.ranks)
        self._on_host = SharedTransport(self.index, self.size, memory, tickets, self._direct, homes)
        self._small = control

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros for what this rank will often send. Local.

        Where CPU ranks share memory, peers read it in place: a collective on it, or on any part of it, saves the copy out. It is an ordinary
        tensor but for its storage, which cannot be resized, and which processes forked later share instead of getting a copy.
        """
        homes = self._homes
        if homes is None or not self.reads_in_place(device):
            return torch.zeros(numel, dtype=dtype, device=device)
        return homes.empty(numel, dtype)

    def reads_in_place(self, device: torch.device) -> bool:
        """Whether peers read this rank's :meth:`buffer` s on ``device`` where they lie."""
        return device.type == "cpu" and self._homes is not None

    def settle(self, tensor: torch.Tensor) -> None:
        """Returns when no peer reads any more from the buffer in which ``tensor`` lies: it may be overwritten. At once for any other tensor.

        Needs the peers to arrive at the collective that it was given to. Raises MeshError where they do not.
        """
        home = self._home_of(tensor)
        if home is not None and not home.settled:
            name = f"the readers of a buffer over {self.name}"
            self.board.waiting(name)
            try:
                home.settle(self.timeout)
            except RuntimeError as error:
                self._fail(name, error)
            self.board.leave()

    def settled(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`settle` would return at once."""
        home = self._home_of(tensor)
        return home is None or home.settled

    @property
    def _homes(self) -> Homes | None:
        return self._on_host.homes if isinstance(self._on_host, SharedTransport) else None

    def _home_of(self, tensor: torch.Tensor) -> Home | None:
        homes = self._homes
        return None if homes is None or tensor.device.type != "cpu" else homes.find(tensor)

    def use_lanes(self, lanes: Lanes) -> None:
        """From now on CPU messages between two ranks go through ``lanes``. All ranks must do so alike."""
        self._lanes = lanes

    def drop_lanes(self) -> None:
        """Messages go through the backend again. All ranks must do so alike."""
        self._lanes = None

    @property
    def transport(self) -> str:
        """How CPU tensors travel here: ``shared memory`` or ``gloo``."""
        return "shared memory" if isinstance(self._on_host, SharedTransport) else "gloo"

    @property
    def control_device(self) -> torch.device:
        """Where small control values must be for :meth:`all_reduce_small`."""
        return self._control

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Pending:
        """Sums ``full`` (n,) over the axis; ``out`` (n/N,) gets this rank's part and may be that part of ``full``. Moves n (N-1)/N elements."""
        return self._start("reduce_scatter", full, out, label, 1)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, *, lend: bool = True) -> Pending:
        """Puts every rank's ``shard`` (n/N,) in rank order into ``full`` (n,); ``shard`` may be this rank's part of ``full``. Moves n (N-1)/N.

        ``lend=False``: peers read no buffer in place here, so that ``shard`` may be written as soon as the result has arrived. Costs a copy.
        """
        return self._start("all_gather", full, shard, label, 1, lend)

    def all_reduce(self, full: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        """Sums ``full`` (n,), n divisible by N, in place: a reduce-scatter and an all-gather, so that its bits are theirs. Moves 2n (N-1)/N.

        ``look(sum, contributions)`` is called with this rank's part of the sum and, on CPU, with what each peer (by axis index) put in, before the
        sum is passed on, which overwrites all of them.
        """
        if self.size == 1:
            return _DONE
        own = full.view(self.size, -1)[self.index]
        self.counters.add("all_reduce", self.name, 2 * full.numel() * (self.size - 1) // self.size, full.element_size())

        def pass_on(received: Received | None) -> Pending:
            if look is not None:
                look(own, received if received is not None else {})
            if received is not None:
                received.release()
            return self._launch("all_gather", full, own, label, again=True)

        return self._launch("all_reduce", full, own, label, then=pass_on)

    def all_reduce_small(self, values: torch.Tensor, label: str, op: str = "sum") -> None:
        """Sum, max or min of a few numbers in place, waited for. Sums are made in rank order in shared memory; gloo's ring is fixed, too."""
        if self.size == 1:
            return
        self.counters.add("all_reduce", self.name, values.numel(), values.element_size())
        if self._small is not None and _fits(values):
            rows = self._exchange_small("all_reduce", label, values)
            total = rows[0].clone()
            for row in rows[1:]:
                _COMBINE[op](total, row, out=total)
            values.copy_(total.view(values.shape))
            return
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        self._now("all_reduce", label, lambda: dist.all_reduce(values, reduce_op, group=self.group, async_op=True))

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
        if self._small is not None and _fits(raw):
            raw.copy_(self._exchange_small("broadcast", label, raw)[source])
        elif isinstance(self._on_host, SharedTransport) and raw.device.type == "cpu":
            self._broadcast_shared(self._on_host, raw, label, source)
        else:
            self._now(
                "broadcast", label, lambda: dist.broadcast(raw, self.ranks[source], group=self.group, async_op=True)
            )
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def gather_json(self, value: Any, label: str) -> list[Any]:
        """Every rank's ``value`` (anything that JSON holds), in rank order, on every rank. For rare, small things."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        device = self._control
        lengths = torch.zeros(self.size, dtype=torch.int64, device=device)
        lengths[self.index] = data.numel()
        self.all_reduce_small(lengths, label)
        sizes = [int(n) for n in lengths.tolist()]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: data.numel()] = data.to(device)
        if self._small is not None and _fits(padded):
            rows = self._exchange_small("gather", label, padded)
        else:
            rows = [torch.empty_like(padded) for _ in range(self.size)]
            self._now("all_gather", label, lambda: dist.all_gather(rows, padded, group=self.group, async_op=True))
        return [json.loads(bytes(row[:n].cpu().tolist())) for row, n in zip(rows, sizes, strict=True)]

    def barrier(self, label: str) -> None:
        """Returns when every rank of the axis has arrived."""
        if self.size > 1:
            self.all_reduce_small(torch.zeros(1, device=self._control), label)

    def send(self, values: torch.Tensor, to: int, label: str, tag: int, *, counted: bool = True) -> Message:
        """Starts to send ``values`` (n,), contiguous, to axis index ``to``, which must :meth:`receive` as many of the same dtype and ``tag``.

        Nobody waits for it before :meth:`Message.wait`. Messages between two ranks arrive in the order of the sends. Moves n elements;
        ``counted=False`` leaves the counting to the caller.
        """
        if counted:
            self.counters.add("send", self.name, values.numel(), values.element_size())
        return self._message("send", values, to, label, tag)

    def receive(self, values: torch.Tensor, source: int, label: str, tag: int) -> Message:
        """Asks for what axis index ``source`` sends next; ``values`` (n,) is filled when :meth:`Message.wait` returns."""
        return self._message("receive", values, source, label, tag)

    def _message(self, kind: str, values: torch.Tensor, peer: int, label: str, tag: int) -> Message:
        name = f"{kind}({label}) {'to' if kind == 'send' else 'from'} rank {self.ranks[peer]}"
        try:
            work = self._between(kind, values, peer, tag)
        except RuntimeError as error:
            self._fail(name, error, (self.ranks[self.index], self.ranks[peer]))
        return Message(self, work, name, values, peer)

    def _between(self, kind: str, values: torch.Tensor, peer: int, tag: int) -> Any:
        if self._lanes is not None and values.device.type == "cpu":
            return self._lanes.send(values, peer, tag) if kind == "send" else self._lanes.receive(values, peer, tag)
        verb = dist.isend if kind == "send" else dist.irecv
        way = (self.index, peer) if kind == "send" else (peer, self.index)
        return verb(values, self.ranks[peer], group=self.directions.get(way, self.group), tag=tag)

    def _start(
        self, kind: str, full: torch.Tensor, part: torch.Tensor, label: str, factor: int, lend: bool = True
    ) -> Pending:
        if self.size == 1:
            if part.data_ptr() != full.data_ptr():
                source, target = (full, part) if kind == "reduce_scatter" else (part, full)
                target.copy_(source)
            return _DONE
        moved = factor * full.numel() * (self.size - 1) // self.size
        self.counters.add(kind, self.name, moved, full.element_size())
        return self._launch(kind, full, part, label, lend=lend)

    def _launch(
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
        transport: Transport = self._on_host if full.device.type == "cpu" else self._native
        name = f"{kind}({label}) over {self.name}"
        self.board.enter(name)
        self._sequence += 1
        tag = message_tag(self._sequence, name)
        try:
            if kind == "all_gather":
                works, finish = transport.all_gather(full, part, tag, again, lend)
            else:
                works, finish = transport.reduce_scatter(full, part, tag)
        except (RuntimeError, OSError) as error:
            self._fail(name, error)
        self.board.leave()
        source = part if kind == "all_gather" else full
        if then is None:
            return Pending(self, name, works, finish, source)

        def go_on() -> Pending:
            result = finish()
            return then(result if isinstance(result, Received) else None)

        return Pending(self, name, works, go_on, source)

    def _broadcast_shared(self, transport: SharedTransport, raw: torch.Tensor, label: str, source: int) -> None:
        name = f"broadcast({label}) over {self.name}"
        self.board.enter(name)
        self._sequence += 1
        try:
            works, finish = transport.broadcast(raw, source, message_tag(self._sequence, name))
        except (RuntimeError, OSError) as error:
            self._fail(name, error)
        Pending(self, name, works, finish, raw).wait()
        self.board.leave()

    def _exchange_small(self, kind: str, label: str, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``values``, flat, in rank order."""
        if self._small is None:
            raise RuntimeError("no shared block")
        name = f"{kind}({label}) over {self.name}"
        self.board.enter(name)
        flat = values.detach().contiguous().view(-1)
        # not through numpy: a tensor that numpy has seen cannot be freed any more
        payload = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
        try:
            found = self._small.exchange(name, payload, self.timeout)
        except RuntimeError as error:
            self._fail(name, error)
        self.board.leave()
        return [
            torch.frombuffer(bytearray(found[index]), dtype=flat.dtype) if index in found else flat
            for index in range(self.size)
        ]

    def _now(self, kind: str, label: str, call: Callable[[], Any]) -> None:
        name = f"{kind}({label}) over {self.name}"
        self.board.enter(name)
        try:
            work = call()
        except RuntimeError as error:
            self._fail(name, error)
        self._await(work, name)
        self.board.leave()

    def _await(self, work: Any, name: str, among: tuple[int, ...] | None = None) -> None:
        self.board.waiting(name)
        try:
            if self.on_cpu:
                work.wait(datetime.timedelta(seconds=self.timeout))
            else:
                work.wait()  # on CUDA this orders streams and does not block; NCCL's watchdog bounds it
        except RuntimeError as error:
            self._fail(name, error, among)
        self.board.leave()

    def _fail(self, name: str, error: Exception, among: tuple[int, ...] | None = None) -> NoReturn:
        raise explain(self.board, among or self.ranks, name, error, self.timeout) from error


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _fits(values: torch.Tensor) -> bool:
    """Whether these values can go through the block for small ones."""
    return values.device.type == "cpu" and 0 < values.numel() * values.element_size() <= CAPACITY


def message_tag(sequence: int, name: str) -> int:
    """Marks the messages of one collective: 20 bits of its number and 11 of its name.

    Ranks that disagree about what comes next then wait for each other in vain, and are told so, instead of summing what does not belong together.
    """
    return (sequence % (1 << 20)) << 11 | zlib.crc32(name.encode()) & 0x7FF


class _Done(Pending):
    def __init__(self) -> None:
        super().__init__(None, "", [], None)


_DONE = _Done()


def wait_all(pendings: Sequence[Pending]) -> None:
    """Waits for several collectives: starts the second halves of all, arrives at all, and then settles them."""
    for pending in pendings:
        pending.turn()
    for pending in pendings:
        pending.arrive()
    for pending in pendings:
        pending.wait()
