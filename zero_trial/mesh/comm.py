"""Collectives along one axis, as this rank calls them: counted, bounded in time, by whichever way the tensors can go.

Every verb is collective over the axis: all its ranks must call it in the same order. An axis of one rank communicates nothing and costs nothing.

    what is under way        :mod:`zero_trial.mesh.pending`        tensors that peers read in place   :mod:`zero_trial.mesh.buffers`
    how a tensor travels     :mod:`zero_trial.mesh.collectives`    a few numbers                      :mod:`zero_trial.mesh.small_values`
    how a wait ends          :mod:`zero_trial.mesh.watch`          between two ranks                  :mod:`zero_trial.mesh.messages`
"""

from __future__ import annotations

from typing import Any

import torch

from zero_trial.mesh.board import Board
from zero_trial.mesh.buffers import Buffers
from zero_trial.mesh.collectives import Collectives
from zero_trial.mesh.counters import CommCounters
from zero_trial.mesh.messages import Lanes, Message, Messages
from zero_trial.mesh.pending import DONE, Look, Pending
from zero_trial.mesh.shared_control import SharedControl
from zero_trial.mesh.shared_homes import Homes
from zero_trial.mesh.shared_mail import SharedMail
from zero_trial.mesh.shared_memory import SharedMemory
from zero_trial.mesh.shared_transport import MessageMail
from zero_trial.mesh.small_values import SmallValues
from zero_trial.mesh.sums import Sum, sum_in_order
from zero_trial.mesh.transport import Received, moves_host_tensors
from zero_trial.mesh.watch import Watch


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
        board: Board,
        timeout: float,
        add: Sum = sum_in_order,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self.group = group
        self.counters = counters
        self.board = board
        self.add = add
        self.takes_host_tensors = group is None or moves_host_tensors(group)
        self.watch = Watch(board, ranks, timeout)
        device = torch.device("cpu") if self.takes_host_tensors else torch.device("cuda", torch.cuda.current_device())
        self._small = SmallValues(name, group, self.watch, device)
        self._buffers = Buffers(name, self.watch)
        self._collectives = Collectives(name, index, group, self.watch, self._buffers, add)
        self._messages = Messages(index, group, self.watch)

    def share_memory(
        self, memory: SharedMemory, control: SharedControl | None, mail: SharedMail | None, homes: Homes | None = None
    ) -> None:
        """From now on CPU tensors go through ``memory``, announced by ``mail`` (or messages), and small values through ``control`` (or gloo):
        every rank of the axis is on this host. ``homes``: where :meth:`buffer` puts tensors. All ranks must do so alike."""
        self._collectives.share(memory, mail if mail is not None else MessageMail(self.group, self.ranks), homes)
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

    def settle(self, tensor: torch.Tensor) -> None:
        """Returns when no peer reads any more from the buffer in which ``tensor`` lies: it may be overwritten. At once for any other tensor.

        Needs the peers to arrive at the collective that it was given to. Raises MeshError where they do not.
        """
        self._buffers.settle(tensor)

    def settled(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`settle` would return at once."""
        return self._buffers.settled(tensor)

    @property
    def directions(self) -> dict[tuple[int, int], Any]:
        """(from index, to index) -> a group for messages that way alone; the axis's own group for all others."""
        return self._messages.directions

    def use_lanes(self, lanes: Lanes) -> None:
        """From now on CPU messages between two ranks go through ``lanes``. All ranks must do so alike."""
        self._messages.lanes = lanes

    def drop_lanes(self) -> None:
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
