"""Reduces full gradients into this rank's gradient shard: reduce-scatter over ``shard``, then
all-reduce over ``replica``, group by group.

    launch   cast to the wire's dtype, reduce-scatter over shard   | at most in_flight groups wait
             all-reduce over replica                               | in each of these
    store    into (or onto) the shard, square sum for the norm, full buffer freed

Every rank launches the reduction of every trained group exactly once per reduced backward pass, and
all ranks use the same order, independent of the order in which gradients become ready: in the first
step the construction order, and from the second step on the order that rank 0 saw in the first. A
group that never becomes ready (unused parameters, another branch taken) is reduced with zeros when
backward has ended. A group that no pass of a step has reduced is reduced before the step
(:meth:`GradReducer.reduce_missing`). These groups are the same on all ranks, so no exchange is
needed. If parameters are freed, a group that becomes ready is also resharded, unless it is kept for
another use (:meth:`Unsharder.reshard_after_gradients`).

Late gradients arrive after their group's reduction: from another engine's loss, or from re-entrant
checkpointing of shared weights. Their group needs a second sum (:meth:`GradReducer.reduce_late`).
Which ranks have late gradients depends on autograd on each rank, so ranks must exchange this: a
rank without late gradients must launch a reduction if another rank has some, and skip it if none
has.

* In the first reduced pass all ranks exchange which groups are late. A late group is reduced at the
  end of each later pass, when all of its gradients have arrived.
* In a step the number of late groups is sent with the norm's exchange. If it is not 0, all ranks
  exchange which groups are late; any rank may have late groups.

On CPU the hook of a ready group waits for an older group's exchange if more than ``in_flight`` are
in flight and hold memory, or if an exchange over replica follows. All ranks wait at the same
launches, so that the all-reduces over replica run in the same order. A model with its own
collectives in backward (SyncBatchNorm) must therefore run them on all ranks at the same place among
its groups. Otherwise ranks deadlock: one waits inside a hook for a rank that took another branch
and waits in the collective. On a device nothing waits in hooks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zero_trial.comm import AxisComm, Pending
from zero_trial.comm.waits import DONE
from zero_trial.ops.dispatch import accumulate
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import square_sum
from zero_trial.sharding.param_group import trace_range
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.unshard import Unsharder


@dataclass(eq=False)
class _Reduction:
    """One group's reduction in flight, and the tensors that it owns."""

    grad_buffer: GradBuffer
    wire: torch.Tensor
    out: torch.Tensor
    stash: torch.Tensor | None  # an earlier sum of this step that the reduction will overwrite
    pending: Pending = DONE
    stored: bool = False
    # of this rank's slice of the sum over replicas, if it was computed
    square_sum: torch.Tensor | None = None


class GradReducer:
    """Reduces the gradient buffers of one model; their hooks call :meth:`grad_ready`.

    Args:
        shard, replica: the axes to reduce-scatter and to all-reduce over.
        unsharder: frees a group's parameters when its gradients are ready (None: they always live).
        wire_dtype: returns the dtype on the wire for a group's dtype (None: the gradient buffer's).
        wire_scale: factor before the sum (prescaling against overflow).
        in_flight: how many groups wait at once in each phase: stages 2 and 3 hold at most that many
            full gradient buffers (twice as many if gradients are also summed over ``replica``).
    """

    def __init__(
        self,
        grad_buffers: Sequence[GradBuffer],
        shard: AxisComm,
        replica: AxisComm,
        *,
        unsharder: Unsharder | None = None,
        wire_dtype: Callable[[torch.dtype], torch.dtype] | None = None,
        wire_scale: float = 1.0,
        in_flight: int = 2,
    ) -> None:
        self.grad_buffers = list(grad_buffers)
        self._shard = shard
        self._replica = replica
        self._unsharder = unsharder
        self._wire_dtype = wire_dtype
        self._wire_scale = wire_scale
        self._in_flight = in_flight
        self._along = shard if shard.size > 1 else replica
        self._on_host = any(grad_buffer.shard.is_cpu for grad_buffer in self.grad_buffers)
        self._order = list(range(len(self.grad_buffers)))
        self._index = {id(grad_buffer): index for index, grad_buffer in enumerate(self.grad_buffers)}
        # group indices in the order in which they became ready, until the order is learned
        self._seen: list[int] = []
        self._learned = False
        self._cursor = 0
        self._ready: set[int] = set()
        # in flight, oldest first: waiting for the sum over shard, and over replica
        self._scattering: deque[_Reduction] = deque()
        self._replicating: deque[_Reduction] = deque()
        self.active = False
        # By group index: square sums of this rank's slices of the finished shards. The norm is
        # their sum over shard and replica.
        self.square_sums: dict[int, torch.Tensor] = {}
        # By group index: the first rank with a non-finite gradient, and the parameter's name.
        self.nonfinite: dict[int, tuple[int, str]] = {}
        for grad_buffer in self.grad_buffers:
            grad_buffer.register_hooks(self.grad_ready)

    # --- a backward pass --------------------------------------------------------------------------

    def begin_pass(self, *, reduce: bool = True) -> None:
        """Start a backward pass; with ``reduce`` its gradients are reduced. Waits for reductions
        that a pass that raised left in flight."""
        self.wait()
        self.active = reduce
        self._cursor = 0
        self._ready.clear()
        for grad_buffer in self.grad_buffers:
            grad_buffer.begin_pass()

    def grad_ready(self, grad_buffer: GradBuffer) -> None:
        """Launch all groups that are next in order, now that this group's gradients are ready.
        Collective through the launched reductions."""
        if self._unsharder is not None:
            self._unsharder.reshard_after_gradients(grad_buffer.group)
        if not self.active:
            return
        index = self._index[id(grad_buffer)]
        if not self._learned:
            self._seen.append(index)
        if not grad_buffer.late:
            self._ready.add(index)
        while self._cursor < len(self._order) and self._order[self._cursor] in self._ready:
            self._launch(self.grad_buffers[self._order[self._cursor]])
            self._cursor += 1

    def finish_pass(self) -> None:
        """End the pass. If its gradients are reduced, reduce the remaining groups and wait for all
        reductions: then every group's shard holds its sum. Collective in that case."""
        for grad_buffer in self.grad_buffers:
            grad_buffer.end_pass()
        if self.active:
            self.active = False
            for index in self._order[self._cursor :]:
                self._launch(self.grad_buffers[index])
            self._cursor = len(self._order)
            self.wait()
            if not self._learned:
                self.reduce_late()
                self._learn_order()

    def reduce(self, grad_buffers: Sequence[GradBuffer]) -> None:
        """Start to reduce ``grad_buffers``, whose gradients are ready: for the step, or for a
        micro-batch. Collective: ranks must agree on the order."""
        chosen = {id(grad_buffer) for grad_buffer in grad_buffers}
        if any(id(reduction.grad_buffer) in chosen for reduction in (*self._scattering, *self._replicating)):
            self.wait()
        for grad_buffer in grad_buffers:
            self._launch(grad_buffer)

    def wait(self) -> None:
        """Wait for all reductions in flight; then their shards hold their sums."""
        for queue in (self._scattering, self._replicating):
            while queue:
                self._advance(queue)

    def sum_copies(self, grad_buffer: GradBuffer, copies: AxisComm) -> None:
        """Sum the reduced shards of ``grad_buffer`` over the ranks that hold copies of it. The
        results are bit-identical.

        Moves 2n (C-1)/C elements for a shard of n on C ranks. Collective over ``copies``.
        """
        # not the group's name, which may differ between the copies (bucket4 here, bucket8 there)
        copies.all_reduce(grad_buffer.shard, f"gradients of {copies.name}").wait()
        self.square_sums[self._index[id(grad_buffer)]] = self._square_sum(grad_buffer)

    # --- before a step ----------------------------------------------------------------------------

    def recount(self, grad_buffer: GradBuffer) -> None:
        """Recompute the group's part of the norm after its shard was changed. Local."""
        index = self._index[id(grad_buffer)]
        self.square_sums[index] = self._square_sum(grad_buffer)
        self.nonfinite.pop(index, None)

    def reduce_missing(self) -> None:
        """Reduce the groups that no backward pass of this step has reduced (``no_sync``, another
        engine's loss). Collective.

        These groups are the same on all ranks, because all ranks launch every reduction together.
        """
        self.wait()
        for grad_buffer in self.grad_buffers:
            if not grad_buffer.shard_filled:
                self._launch(grad_buffer)
        self.wait()

    def late_groups(self) -> int:
        """Count the groups with gradients that arrived after their reduction, on this rank."""
        count = 0
        for grad_buffer in self.grad_buffers:
            count += grad_buffer.has_gradients
        return count

    def reduce_late(self) -> None:
        """Reduce late gradients: if any rank has some, the group gets a second sum on top of the
        first; ranks without late gradients add zeros.

        Exchanges one flag per group. Collective over shard and replica: see the top of this file
        for when ranks call it.
        """
        late = [int(grad_buffer.has_gradients) for grad_buffer in self.grad_buffers]
        for axis in (self._shard, self._replica):
            rows = axis.gather_row(late, "groups with late gradients")
            late = [max(flags) for flags in zip(*rows, strict=True)]
        for grad_buffer, is_late in zip(self.grad_buffers, late, strict=True):
            if is_late:
                self._launch(grad_buffer)
        self.wait()

    def reset(self) -> None:
        """Drop all gradients and sums of this step; waits for reductions in flight."""
        self.wait()
        for grad_buffer in self.grad_buffers:
            grad_buffer.reset()
        self.square_sums.clear()
        self.nonfinite.clear()
        self.active = False

    # --- the order --------------------------------------------------------------------------------

    def _learn_order(self) -> None:
        """Adopt rank 0's order, with groups that became ready late or never at the end."""
        seen = list(dict.fromkeys(index for index in self._seen if not self.grad_buffers[index].late))
        order = list(dict.fromkeys([*seen, *self._order]))
        for axis in (self._shard, self._replica):
            order = axis.gather_json(order, "reduction order")[0]
        self._order = order
        self._learned = True
        self._seen.clear()

    def order_by_name(self) -> list[str] | None:
        """Return the learned order, for a checkpoint; None before the first reduced step."""
        return [self.grad_buffers[index].group.name for index in self._order] if self._learned else None

    def set_order(self, names: list[str] | None) -> None:
        """Continue with a learned order of exactly these groups; it changes no results."""
        known = {grad_buffer.group.name: index for index, grad_buffer in enumerate(self.grad_buffers)}
        if names is not None and sorted(names) == sorted(known):
            self._order = [known[name] for name in names]
            self._learned = True

    # --- one reduction ----------------------------------------------------------------------------

    def _launch(self, grad_buffer: GradBuffer) -> None:
        """Start the group's reduction, and advance older ones to at most ``in_flight`` a phase."""
        with trace_range("reduce"):
            shard, rows = grad_buffer.shard, self._shard.size
            stash = shard.clone() if grad_buffer.in_place and grad_buffer.shard_filled else None
            full = grad_buffer.seal()
            wire, dtype = (
                full,
                self._wire_dtype(grad_buffer.group.dtype) if self._wire_dtype is not None else full.dtype,
            )
            if full.dtype != dtype:
                wire = self._along.buffer(full.numel(), dtype, full.device).copy_(full)
            if self._wire_scale != 1.0:
                wire.mul_(self._wire_scale)
            straight = not grad_buffer.in_place and not grad_buffer.shard_filled and shard.dtype == wire.dtype
            out = shard if straight and rows > 1 else wire.view(rows, -1)[self._shard.index]
            reduction = _Reduction(grad_buffer, wire, out, stash)
            look = partial(self._look, reduction) if self._on_host and self._along is self._shard else None
            reduction.pending = self._shard.reduce_scatter(wire, out, grad_buffer.group.name, look)
            self._scattering.append(reduction)
            if rows == 1:
                self._advance(self._scattering)
            # Another exchange follows the first one, and starts in backward.
            holds = wire is not full or grad_buffer.group.plan.grads is Lifetime.USE
            if len(self._scattering) > self._in_flight and (holds or self._replica.size > 1):
                self._advance(self._scattering)
            if len(self._replicating) > self._in_flight and holds:
                self._advance(self._replicating)

    def _advance(self, queue: deque[_Reduction]) -> None:
        """Wait for ``queue``'s oldest reduction; start its replica sum or end it. In rank order."""
        reduction = queue[0]
        reduction.pending.wait()
        if queue is self._scattering and self._replica.size > 1:
            look = partial(self._look, reduction) if self._on_host and self._along is self._replica else None
            reduction.pending = self._replica.all_reduce(reduction.out, reduction.grad_buffer.group.name, look)
            self._replicating.append(queue.popleft())
            return
        queue.popleft()
        if not reduction.stored:
            self._store(reduction)
        reduction.grad_buffer.end_reduction()

    def _look(self, reduction: _Reduction, total: torch.Tensor, contributions: Mapping[int, torch.Tensor]) -> None:
        """Check the sum over the first axis while its ranks' contributions are readable: only here
        the rank of a non-finite value is known, because a sum over another axis spreads the value.
        A sum over shard alone is stored immediately."""
        index = self._index[id(reduction.grad_buffer)]
        if self._replica.size == 1:
            self._store(reduction)
            squares = self.square_sums[index]
        else:
            squares = square_sum(total)
            if self._along is self._replica:
                reduction.square_sum = squares
        if math.isfinite(squares.item()) or index in self.nonfinite:
            return
        layout = reduction.grad_buffer.group.layout
        low = layout.shard_range(self._shard.index)[0]
        if self._along is self._replica:
            low += layout.shard_numel // self._replica.size * self._replica.index
        # If no peer contributed a bad value, this rank did; the sum has overwritten it.
        for rank, values in (*sorted(contributions.items()), (self._along.index, total)):
            position = first_nonfinite(values)
            if position is not None and (slot := layout.slot_at(low + position)) is not None:
                self.nonfinite[index] = self._along.ranks[rank], slot.name
                return

    def _store(self, reduction: _Reduction) -> None:
        """Write the sum into the shard, or add it to an earlier one; update the norm's part."""
        grad_buffer, out = reduction.grad_buffer, reduction.out
        shard = grad_buffer.shard
        adds = reduction.stash is not None if grad_buffer.in_place else grad_buffer.shard_filled
        if adds and not grad_buffer.in_place:
            accumulate(shard, out)
        elif out.data_ptr() != shard.data_ptr():
            shard.copy_(out)
        if reduction.stash is not None:
            shard.add_(reduction.stash)
        # already computed by _look; valid for the shard only if the shard holds exactly this sum
        total = reduction.square_sum
        if total is None or adds or out.dtype != shard.dtype:
            total = self._square_sum(grad_buffer)
        self.square_sums[self._index[id(grad_buffer)]] = total
        reduction.stored = True

    def _square_sum(self, grad_buffer: GradBuffer) -> torch.Tensor:
        """Sum the squares that this rank counts in the norm: each replica counts one slice."""
        shard = grad_buffer.shard
        return square_sum(shard if self._replica.size == 1 else shard.view(self._replica.size, -1)[self._replica.index])


def first_nonfinite(values: torch.Tensor) -> int | None:
    """Return the index of the first element that is not finite."""
    bad = torch.nonzero(~torch.isfinite(values.reshape(-1)), as_tuple=False)
    return int(bad[0]) if bad.numel() else None
