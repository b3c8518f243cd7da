"""Collectives along one axis, as this rank calls them: counted, with a timeout, over the transport
that fits the tensors.

Every verb is collective over the axis: all its ranks must call it in the same order. An axis of one
rank communicates nothing and costs nothing.

Each verb is implemented once, in AxisComm; a :class:`~zero_trial.comm.backends.Transport` moves
tensors and control values. A verb in flight is a :class:`~zero_trial.comm.waits.Pending`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.comm.backends import (
    CommCounters,
    Counts,
    DirectTransport,
    Look,
    NativeTransport,
    Sum,
    Transport,
    moves_host_tensors,
    sum_in_order,
)
from zero_trial.comm.diagnosis import disagreement
from zero_trial.comm.waits import DONE, FIRST_MESSAGE_TAG, CallOrder, Heartbeat, Message, Pending, Watchdog
from zero_trial.device import own_device
from zero_trial.errors import MeshError

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

# Tensors of failed broadcasts. They must outlive the group, because a gloo thread still holds them.
# Freeing a tensor without Python references needs the GIL, but the thread that frees the group
# holds the GIL while it waits for the gloo thread: a deadlock (torch 2.6).
_FAILED: list[torch.Tensor] = []


class AxisComm:
    """One axis of the mesh as this rank sees it: its size, this rank's index on it, and the
    collectives along it.

    Args:
        name: of the axis, in counters and errors.
        ranks: global ranks on the axis, by axis index.
        index: of this rank.
        group: their process group; None for an axis of one rank.
        timeout: seconds that a wait may take; then a MeshError names this rank, the operation, the
            step and the missing rank.
        add: computes the sums of tensors on the host.
        number: of the mesh, the same on every rank; see :class:`CallOrder`.
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
        number: int = 0,
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
        self.order = CallOrder(number, f"{name} {zlib.crc32(repr(ranks).encode())}" if len(ranks) > 1 else "")
        if len(ranks) > 1:
            heartbeat.watch_calls(self.order)
        self.takes_host_tensors = group is None or moves_host_tensors(group)
        # Where control values must be for :meth:`all_reduce_small`.
        self.control_device = torch.device("cpu") if self.takes_host_tensors else own_device()
        # host tensors use direct exchange until the ranks share memory
        self._host_transport: Transport = DirectTransport(group, ranks, index, add)
        self._device_transport: Transport = NativeTransport(group)
        # Messages between two axis indices use the group of that pair; all other messages use the
        # axis's own group.
        self.directions: dict[tuple[int, int], Any] = {}

    def share_memory(self, transport: Transport) -> None:
        """Use ``transport`` for host tensors from now on; all ranks must call it, on one host."""
        self._host_transport = transport

    @property
    def transport_name(self) -> str:
        """Return how the ranks exchange tensors on the host: ``shared memory`` or ``gloo``."""
        return self._host_transport.name

    # --- buffers that peers may read in place -----------------------------------------------------

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized flat tensor for data that this rank sends often. Local.

        If CPU ranks share memory, peers read it directly: a collective on the tensor, or on a part
        of it, saves a copy. It is an ordinary tensor, except that its storage cannot be resized,
        and that processes forked later share it instead of getting a copy.
        """
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self._host_transport.buffer(numel, dtype)

    def shares_memory(self, device: torch.device) -> bool:
        """Return whether peers read this rank's :meth:`buffer` s on ``device`` directly."""
        return device.type == "cpu" and self._host_transport.shares_memory

    def trim(self) -> None:
        """Return the memory of dropped buffers to the system."""
        self._host_transport.trim()

    # --- tensors ----------------------------------------------------------------------------------

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        """Sum ``full`` (n,) over the axis; ``out`` (n/N,) gets this rank's part and may be that
        part of ``full``. Moves n (N-1)/N elements.

        ``look(sum, contributions)`` is called with this rank's part of the sum and, on CPU, with
        each peer's contribution (by axis index) while it is readable. Not on an axis of one rank.
        """
        if self.size == 1:
            return _copied(full, out)
        moved = full.numel() * (self.size - 1) // self.size
        return self._start("reduce_scatter", label, moved, full, out, look=look)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Pending:
        """Put every rank's ``shard`` (n/N,) in rank order into ``full`` (n,); ``shard`` may be this
        rank's part of ``full``. Moves n (N-1)/N."""
        if self.size == 1:
            return _copied(shard, full)
        moved = full.numel() * (self.size - 1) // self.size
        return self._start("all_gather", label, moved, full, shard)

    def all_reduce(self, full: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        """Sum ``full`` (n,), n divisible by N, in place; bit-identical to a reduce-scatter and an
        all-gather. Moves 2n (N-1)/N. ``look``: see :meth:`reduce_scatter`."""
        if self.size == 1:
            return DONE
        own, moved = full.view(self.size, -1)[self.index], 2 * full.numel() * (self.size - 1) // self.size
        return self._start("all_reduce", label, moved, full, own, look=look)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, counts: Counts, label: str) -> Pending:
        """Exchange parts of any size: ``counts[i][j]`` elements go from axis index i to j, the same
        table on every rank, with zeros on its diagonal.

        Moves the sum of this rank's row.

        Args:
            sent: (sum of this rank's row,), by receiver.
            received: (sum of this rank's column,), by sender.
        """
        if self.size == 1:
            return DONE
        return self._start("all_to_all", label, sent.numel(), sent, received, counts)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Overwrite ``tensor`` (any dtype, any strides) with axis index ``source``'s, and wait."""
        if self.size == 1 or tensor.numel() == 0:
            return
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension is one row in memory
        moved, values = tensor.numel() if self.index == source else 0, tensor.contiguous()
        raw = values.view(-1).view(torch.uint8)  # as bytes: backends know few dtypes
        self.counters.add("broadcast", self.name, moved, tensor.element_size())
        try:
            self._start("broadcast", label, None, raw, source).wait()
        except MeshError:
            _FAILED.append(raw)
            raise
        if values is not tensor:
            tensor.copy_(values)

    def _start(
        self,
        kind: str,
        label: str,
        moved: int | None,
        values: torch.Tensor,
        *given: Any,
        verb: str = "",
        **options: Any,
    ) -> Pending:
        """Start the collective ``kind`` of ``values``, which moves so many elements; None: they are
        counted already. ``verb``: the transport's method, for control values.

        The tag of control values contains only their own name; the tag of tensors is a digest of
        all calls. A device's backend compares no tags, so ranks that called it for different
        tensors must still be able to exchange the control values that detect this.
        """
        if moved is not None:
            self.counters.add(kind, self.name, moved, values.element_size())
        name = f"{kind}({label}) over {self.name}"
        self.heartbeat.begin(name, self.ranks)
        tag, on_host = self.order.note(name), values.is_cpu
        if verb:
            tag = zlib.crc32(name.encode()) % FIRST_MESSAGE_TAG
        transport = self._host_transport if on_host else self._device_transport
        # the source of a broadcast by the backend does not wait for the others
        call = self.order.call if kind != "broadcast" or transport.shares_memory else None
        try:
            steps = getattr(transport, verb or kind)(values, *given, tag=tag, **options)
            pending = Pending(self.watch, name, steps, on_host, call)
        except (RuntimeError, OSError) as error:
            self.watch.fail(name, error)
        if transport.under_way is not None:
            transport.under_way.add(pending)
        return pending

    # --- control values ---------------------------------------------------------------------------

    def all_reduce_small(self, values: torch.Tensor, label: str, op: str = "sum") -> None:
        """Replace a few numbers with their sum, max or min in rank order, and wait."""
        if self.size > 1:
            self.counters.add("all_reduce", self.name, values.numel(), values.element_size())
            rows = self._gather("all_reduce", label, values)
            values.copy_(reduce(_COMBINE[op], rows).view(values.shape))

    def all_reduce_guarded(self, values: torch.Tensor, label: str) -> None:
        """Sum ``values`` (float64) like :meth:`all_reduce_small`; the first becomes NaN, on every
        rank, if the ranks have called different collectives on this axis before.

        On the host the transports compare each call, and nothing is added. A device's backend does
        not compare: two ranks that gather different tensors of one size get each other's. So a
        digest of all calls so far is summed, too: a number below 2^16 and its square, whose sums
        are exact. N times the second sum equals the square of the first only if all digests are
        equal. A mismatch stays in the digest: k sums in a row miss it with probability 2^-16k.
        """
        if self.size == 1 or values.is_cpu:
            self.all_reduce_small(values, label)
            return
        mark = float(self.order.digest >> 16)
        marked = torch.cat([values, values.new_full((1,), mark), values.new_full((1,), mark * mark)])
        self.all_reduce_small(marked, label)
        values.copy_(marked[:-2])
        total, squares = marked[-2:-1], marked[-1:]
        values[:1].masked_fill_(squares - total * (total / self.size) > 0.25, float("nan"))

    def compare_calls(self, where: str) -> None:
        """Raise MeshError, on every rank, if the ranks have called different collectives on this
        axis. Collective; for rare calls, or after something went wrong."""
        if self.size == 1:
            return
        count, digest, calls = self.order.count, self.order.digest, self.order.recent()
        rows = self.gather_row([count, digest], "order of calls")
        if all(row == rows[0] for row in rows):
            return
        everyone = self.gather_json(calls, "calls")
        known = {rank: (rows[i][0], everyone[i]) for i, rank in enumerate(self.ranks)}
        raise disagreement(known, f"rank {self.ranks[self.index]}, step {self.heartbeat.step}, {where}")

    def gather_row(self, row: list[int], label: str) -> list[list[int]]:
        """Return every rank's ``row`` of a few integers, in rank order; rows have equal length."""
        if self.size == 1:
            return [row]
        self.counters.add("all_reduce", self.name, self.size * len(row), 8)
        own = torch.tensor(row, dtype=torch.int64, device=self.control_device)
        return [each.tolist() for each in self._gather("all_reduce", label, own)]

    def gather_json(self, value: Any, label: str) -> list[Any]:
        """Return every rank's ``value`` (any JSON value), in rank order, on every rank.

        For small values and rare calls.
        """
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [size for (size,) in self.gather_row([data.numel()], label)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.control_device)
        padded[: data.numel()] = data.to(self.control_device)
        rows = self._gather("gather", label, padded)
        return [json.loads(bytes(row[:n].cpu().tolist())) for row, n in zip(rows, sizes, strict=True)]

    def barrier(self, label: str) -> None:
        """Block until every rank of the axis has called this method."""
        if self.size > 1:
            self.all_reduce_small(torch.zeros(1, device=self.control_device), label)

    def _gather(self, kind: str, label: str, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return every rank's ``values``, flat, in rank order."""
        flat = values.detach().contiguous().view(-1)
        table = flat.new_empty(self.size * flat.numel())
        self._start(kind, label, None, table, flat, verb="all_gather").wait()
        return table.view(self.size, -1).unbind()

    # --- messages between two ranks ---------------------------------------------------------------

    def send(self, values: torch.Tensor, to: int, label: str, tag: int, *, counted: bool = True) -> Message:
        """Start to send ``values`` (n,), contiguous, to axis index ``to``, which must
        :meth:`receive` the same number of elements with the same dtype and ``tag``.

        Messages between two ranks are received in the order of the sends. Moves n elements;
        ``counted=False`` leaves the counting to the caller.
        """
        if counted:
            self.counters.add("send", self.name, values.numel(), values.element_size())
        return self._start_message("send", values, to, label, tag)

    def receive(self, values: torch.Tensor, source: int, label: str, tag: int) -> Message:
        """Start to receive ``source``'s next message; :meth:`Message.wait` fills ``values``."""
        return self._start_message("receive", values, source, label, tag)

    def _start_message(self, kind: str, values: torch.Tensor, peer: int, label: str, tag: int) -> Message:
        sends = kind == "send"
        name = f"{kind}({label}) {'to' if sends else 'from'} rank {self.ranks[peer]}"
        among = (self.ranks[self.index], self.ranks[peer])
        try:
            verb = dist.isend if sends else dist.irecv
            way = (self.index, peer) if sends else (peer, self.index)
            work = verb(values, self.ranks[peer], group=self.directions.get(way, self.group), tag=tag)
        except (RuntimeError, OSError) as error:
            self.watch.fail(name, error, among)
        return Message(self.watch, work, name, values, among)


def _copied(source: torch.Tensor, target: torch.Tensor) -> Pending:
    """Copy ``source`` into ``target``: the collective of one rank.

    Compares storages, because tensors on the meta device have no addresses.
    """
    same = source.untyped_storage()._cdata == target.untyped_storage()._cdata
    if not same or source.storage_offset() != target.storage_offset():
        target.copy_(source)
    return DONE
