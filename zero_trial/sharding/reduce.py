"""Gradients in the dtype of the wire, where that is not the one in which they were added up: cast straight to where peers read them.

    rooms   where ranks read in place: taken for a reduction and given back when it has landed; no copy out follows
    else    a tensor of its own per reduction

Price: n elements of the wire's dtype per reduction in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from zero_trial.comm import AxisComm, Pending
from zero_trial.comm.collective import DONE
from zero_trial.ops.dispatch import accumulate
from zero_trial.sharding.dtypes import wide_dtype
from zero_trial.sharding.grad_buffer import BufferPool, GradBuffer, PooledBuffer
from zero_trial.sharding.norm import square_sum
from zero_trial.sharding.plan import ReduceAt


class WireCasts:
    """Casts along ``comm``, at most about ``most`` at once."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._comm = comm
        self._rooms = BufferPool(comm, most)

    def cast(self, full: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, PooledBuffer | None]:
        """``full`` (n,) in ``dtype``, and the room that it lies in."""
        if not self._comm.reads_in_place(full.device):
            return full.to(dtype), None
        nbytes = full.numel() * dtype.itemsize
        room = self._rooms.take(nbytes)
        return room.buffer[:nbytes].view(dtype).copy_(full), room

    def release(self, room: PooledBuffer | None) -> None:
        """The reduction has landed; peers may still be reading."""
        if room is not None:
            self._rooms.give_back(room)


# Turns full gradients into this rank's gradient shard: reduce-scatter over ``shard``, then all-reduce over ``replica``, group by group.
#
# Groups are reduced in one order on all ranks, whatever the order in which their gradients became complete: first the construction order, then, from
# the second step on, the order that rank 0 saw in the first. A group that never completes (unused parameters, another branch taken) is
# reduced with zeros when backward has ended: a missing gradient never leaves another rank waiting.


class _Phase(Enum):
    """What a reduction waits for next. Along an axis of one rank there is nothing to wait for."""

    SCATTER = "the sum over shard"
    REDUCE = "the sum over replica"
    GATHER = "its way to the other replicas"


@dataclass(eq=False)
class _Flight:
    """One group's reduction under way, and the tensors that it owns."""

    grad_buffer: GradBuffer
    wire: torch.Tensor
    room: PooledBuffer | None  # in which the wire lies, if it is a cast that peers read in place
    out: torch.Tensor
    stash: torch.Tensor | None  # an earlier sum of this step that the reduction will overwrite
    scatter: Pending
    phase: _Phase = _Phase.SCATTER
    reduce: Pending = DONE
    square_sum: torch.Tensor | None = None  # of this rank's slice of the sum over replicas, where it was looked at
    bad_replicas: dict[int, int] = field(
        default_factory=dict
    )  # replica index -> first position that is not finite, in its slice


@dataclass(frozen=True)
class NonFiniteGradient:
    """A non-finite gradient: whose (rank; None when only the sum is known), and the group and position in its flat buffer.

    ``exact`` is False when what is known to be bad is a sum over the shard axis to which ``rank`` belongs.
    """

    rank: int | None
    grad_buffer: GradBuffer
    position: int
    exact: bool = True

    def parameter(self) -> str:
        slot = self.grad_buffer.group.layout.slot_at(self.position)
        return slot.name if slot is not None else self.grad_buffer.group.name


class GradReducer:
    """Reduces the gradient buffers of one model.

    ``wire_dtype``: dtype on the wire (None: the gradient buffer's own). ``wire_scale`` multiplies before the sum (prescaling against overflow).
    ``in_flight`` bounds how many groups wait at once in each phase, so that stage 2 and 3 hold at most that many full gradient buffers (three
    times as many where gradients go over ``replica``, too).
    """

    def __init__(
        self,
        grad_buffers: Sequence[GradBuffer],
        shard: AxisComm,
        replica: AxisComm,
        *,
        wire_dtype: torch.dtype | None = None,
        wire_scale: float = 1.0,
        in_flight: int = 2,
    ) -> None:
        self.grad_buffers = list(grad_buffers)
        self._shard = shard
        self._replica = replica
        self._wire_dtype = wire_dtype
        self._wire_scale = wire_scale
        self._in_flight = in_flight
        self._wires = WireCasts(shard if shard.size > 1 else replica, in_flight + 2)
        self._order = list(range(len(self.grad_buffers)))
        self._index = {id(grad_buffer): index for index, grad_buffer in enumerate(self.grad_buffers)}
        self._completed: list[int] = []
        self._learned = False
        self._cursor = 0
        self._ready: set[int] = set()
        self._flights: list[_Flight] = []
        self.active = False
        # By group index, of this rank's slices of the finished shards: the norm is their sum over shard and replica.
        self.square_sums: dict[int, torch.Tensor] = {}
        self.culprits: list[NonFiniteGradient] = []

    def begin(self, *, reduce: bool = True) -> None:
        """A backward pass starts; ``reduce``: it is to be reduced. What one that ended in an exception left under way is waited for."""
        self._land_all()
        self.active = reduce
        self._cursor = 0
        self._ready.clear()

    def offer(self, grad_buffer: GradBuffer) -> None:
        """A group's gradients are complete. Launches all groups whose turn it is. Collective through the launched reductions."""
        if not self.active:
            return
        index = self._index[id(grad_buffer)]
        if not self._learned:
            self._completed.append(index)
        if not grad_buffer.late:
            self._ready.add(index)
        while self._cursor < len(self._order) and self._order[self._cursor] in self._ready:
            self._launch(self.grad_buffers[self._order[self._cursor]])
            self._cursor += 1

    def finish(self) -> None:
        """Reduces what is left and waits for everything; then every group's shard holds its sum. Collective: every rank must call."""
        if self.active:
            self.active = False
            for index in self._order[self._cursor :]:
                self._launch(self.grad_buffers[index])
            self._cursor = len(self._order)
            self._land_all()
            if not self._learned:
                self._learn()

    def reduce(self, grad_buffers: Sequence[GradBuffer]) -> None:
        """Starts to reduce these, whose gradients are complete: for the step, or for a micro-batch. Collective: ranks must agree on the order."""
        chosen = {id(grad_buffer) for grad_buffer in grad_buffers}
        if any(id(flight.grad_buffer) in chosen for flight in self._flights):
            self.land()
        for grad_buffer in grad_buffers:
            self._launch(grad_buffer)

    def land(self) -> None:
        """Waits for all reductions under way; then their shards hold their sums."""
        self._land_all()

    def sum_copies(self, grad_buffer: GradBuffer, copies: AxisComm) -> None:
        """Adds up the reduced shards of ``gradient buffer`` over the ranks that hold copies of it; then all have the sum, bit by bit the same.

        Moves 2n (C-1)/C elements for a shard of n on C ranks. Collective over ``copies``.
        """
        grad_buffer.await_readers()
        copies.all_reduce(grad_buffer.shard, grad_buffer.group.name).wait()
        self.square_sums[self._index[id(grad_buffer)]] = square_sum(self._counted(grad_buffer))

    def ensure_reduced(self) -> None:
        """Before a step: reduces groups whose gradients no reduced backward pass took along. Collective: every rank must call.

        Those are gradients from another engine's loss, from ``no_sync``, or such as came after their group was complete (re-entrant
        checkpointing of shared weights); a group that was reduced before gets a second sum on top of the first. A group that has such gradients
        on one rank alone is reduced on all of them: the others add zeros.
        """
        self.land()
        for index in self._left_anywhere():
            self._launch(self.grad_buffers[index])
        self._land_all()

    def _left_anywhere(self) -> list[int]:
        """Return the groups that are still to be reduced on some rank, the same list on all.

        One number is exchanged when there are none. On a device no rank asks: the answer would stop the
        host in every step. There a rank that alone has gradients left waits in its reduction until the time limit.
        """
        own = [not grad_buffer.shard_filled or grad_buffer.touched for grad_buffer in self.grad_buffers]
        on_host = any(self._shard.on_host(grad_buffer.group.full) for grad_buffer in self.grad_buffers)
        axes = [axis for axis in (self._shard, self._replica) if axis.size > 1 and on_host]
        if axes:
            count = torch.tensor([sum(own)], dtype=torch.int32, device=axes[0].control_device)
            for axis in axes:
                axis.all_reduce_small(count, "gradients left to reduce", "max")
            if bool(count.any()):
                flags = torch.tensor(own, dtype=torch.int32, device=axes[0].control_device)
                for axis in axes:
                    axis.all_reduce_small(flags, "groups left to reduce", "max")
                own = [bool(left) for left in flags.tolist()]
        return [index for index, left in enumerate(own) if left]

    def reset(self) -> None:
        """Forgets all gradients and sums of this step; reductions under way (backward ended in an exception) are waited for."""
        self._land_all()
        for grad_buffer in self.grad_buffers:
            grad_buffer.reset()
        self.square_sums.clear()
        self.culprits.clear()
        self.active = False

    def _learn(self) -> None:
        """From now on groups go in the order that rank 0 saw, those that completed late or never at the end."""
        seen = list(dict.fromkeys(index for index in self._completed if not self.grad_buffers[index].late))
        order = seen + [index for index in self._order if index not in seen]
        for axis in (self._shard, self._replica):
            order = axis.gather_json(order, "reduction order")[0]
        self._order = order
        self._learned = True
        self._completed.clear()

    def order_by_name(self) -> list[str] | None:
        """The learned order, for a checkpoint; None before the first reduced step."""
        return [self.grad_buffers[index].group.name for index in self._order] if self._learned else None

    def take_order(self, names: list[str] | None) -> None:
        """Continues with a learned order, if it is one of these groups. The order never changes results, only what overlaps."""
        known = {grad_buffer.group.name: index for index, grad_buffer in enumerate(self.grad_buffers)}
        if names is not None and sorted(names) == sorted(known):
            self._order = [known[name] for name in names]
            self._learned = True

    def _launch(self, grad_buffer: GradBuffer) -> None:
        stash = grad_buffer.shard.clone() if grad_buffer.in_place and grad_buffer.shard_filled else None
        full = grad_buffer.close()
        dtype = wide_dtype(full.dtype, self._wire_dtype or full.dtype)
        wire, room = (full, None) if dtype == full.dtype else self._wires.cast(full, dtype)
        if self._wire_scale != 1.0:
            wire.mul_(self._wire_scale)
        low, high = grad_buffer.group.layout.shard_range(self._shard.index)
        straight = not grad_buffer.in_place and not grad_buffer.shard_filled and grad_buffer.shard.dtype == dtype
        out = grad_buffer.shard if straight and self._shard.size > 1 else wire[low:high]
        if stash is not None and self._shard.size > 1:
            out = torch.empty_like(out)  # replicas may read it after the earlier sum was added where gradients live
        scatter = self._shard.reduce_scatter(wire, out, grad_buffer.group.name)
        flight = _Flight(grad_buffer, wire, room, out, stash, scatter)
        self._flights.append(flight)
        if self._shard.size == 1:
            self._advance(flight)
        for phase in _Phase:
            waiting = [flight for flight in self._flights if flight.phase is phase]
            if len(waiting) > self._in_flight:
                self._advance(waiting[0])

    def _advance(self, flight: _Flight) -> None:
        """Waits for the flight's phase and starts the next one. All ranks do so in the same order."""
        if flight.phase is _Phase.SCATTER:
            flight.scatter.wait_result(keep=True)
            self._over_replicas(flight)
            flight.phase = _Phase.REDUCE
            if self._replica.size > 1:
                return
        elif flight.phase is _Phase.REDUCE:
            flight.reduce.start_next()
            flight.phase = _Phase.GATHER
            return
        flight.reduce.wait_result()
        self._flights.remove(flight)
        self._store(flight)

    def _over_replicas(self, flight: _Flight) -> None:
        """Starts the sum over ``replica``, and takes note of its squares and of whose part spoils it: the sum is passed on over what was put in."""

        def look(total: torch.Tensor, contributions: Mapping[int, torch.Tensor]) -> None:
            if not self._replica.on_host(total):
                return
            flight.square_sum = square_sum(total)
            if not math.isfinite(flight.square_sum.item()):
                found = {index: first_nonfinite(part) for index, part in contributions.items()}
                flight.bad_replicas = {index: position for index, position in found.items() if position is not None}

        flight.reduce = self._replica.all_reduce(flight.out, flight.grad_buffer.group.name, look)

    def _land_all(self) -> None:
        for phase in _Phase:
            for flight in [flight for flight in self._flights if flight.phase is phase]:
                self._advance(flight)

    def _store(self, flight: _Flight) -> None:
        grad_buffer, out = flight.grad_buffer, flight.out
        total = flight.square_sum if self._holds_all_of(flight) else None
        if grad_buffer.in_place:
            if out.data_ptr() != grad_buffer.own.data_ptr():
                grad_buffer.own.copy_(out)
            if flight.stash is not None:
                if self._shard.size == 1:  # else peers read only their own parts, and this rank's is its own
                    grad_buffer.await_readers()
                grad_buffer.own.add_(flight.stash)
        elif grad_buffer.shard_filled:
            accumulate(grad_buffer.shard, out)
        elif out.data_ptr() != grad_buffer.shard.data_ptr():
            grad_buffer.shard.copy_(out)
        grad_buffer.shard_filled = True
        total = square_sum(self._counted(grad_buffer)) if total is None else total
        self.square_sums[self._index[id(grad_buffer)]] = total
        if self._shard.on_host(total) and not self._is_bad(grad_buffer) and not self._is_finite(grad_buffer, total):
            self.culprits.extend(self._find(flight))
        flight.scatter.received.release()
        self._wires.release(flight.room)
        grad_buffer.free()
        if grad_buffer.group.plan.reduce_at is ReduceAt.MICRO:
            grad_buffer.sealed = False

    def _holds_all_of(self, flight: _Flight) -> bool:
        """Whether the shard will be this sum, and nothing else."""
        added = flight.stash is not None if flight.grad_buffer.in_place else flight.grad_buffer.shard_filled
        return not added and flight.out.dtype == flight.grad_buffer.shard.dtype

    def _counted(self, grad_buffer: GradBuffer) -> torch.Tensor:
        """What of the reduced shard this rank counts in the norm: replicas hold the same, so that each counts one slice."""
        return grad_buffer.shard.view(self._replica.size, -1)[self._replica.index]

    def _is_finite(self, grad_buffer: GradBuffer, total: torch.Tensor) -> bool:
        """Whether this rank has nothing to say about a culprit. Where both axes reduce, a bad value in a slice that another replica counts may
        have come over this rank's shard axis, and only here it is known from whom: all of the shard is read."""
        if math.isfinite(total.item()) and self._replica.size > 1 and self._shard.size > 1:
            total = square_sum(grad_buffer.shard)
        return math.isfinite(total.item())

    def _is_bad(self, grad_buffer: GradBuffer) -> bool:
        """An earlier micro-batch has spoilt it already: later ones are not to blame."""
        return any(culprit.grad_buffer is grad_buffer for culprit in self.culprits)

    def _find(self, flight: _Flight) -> list[NonFiniteGradient]:
        """Whose contribution was not finite: seen where direct exchange still holds each rank's part; else only the place in the sum.

        Over replica each rank holds the parts of one slice of its shard. Two ranks may see the same fault: the one on whose shard axis it
        happened sees the rank, the one that adds the replicas sees that axis (or the rank, where it is of size one).
        """
        grad_buffer, shard, replica = flight.grad_buffer, self._shard, self._replica
        low, _ = grad_buffer.group.layout.shard_range(shard.index)
        found = [
            NonFiniteGradient(shard.ranks[index], grad_buffer, low + position)
            for index, part in flight.scatter.received.items()
            if (position := first_nonfinite(part)) is not None
        ]
        between = replica.on_host(grad_buffer.shard) and replica.size > 1
        length = grad_buffer.group.layout.shard_numel // replica.size
        start = length * replica.index if between else 0
        if not found:
            found = [
                NonFiniteGradient(replica.ranks[index], grad_buffer, low + start + position, exact=shard.size == 1)
                for index, position in flight.bad_replicas.items()
            ]
        if not found:
            position = first_nonfinite(grad_buffer.shard[start : start + length] if between else grad_buffer.shard)
            known = bool(between or flight.scatter.received) or shard.size == replica.size == 1
            if position is not None:
                found.append(
                    NonFiniteGradient(shard.ranks[shard.index] if known else None, grad_buffer, low + start + position)
                )
        return found


def first_nonfinite(values: torch.Tensor) -> int | None:
    """The index of the first element that is not finite."""
    bad = torch.nonzero(~torch.isfinite(values.reshape(-1)), as_tuple=False)
    return int(bad[0]) if bad.numel() else None
