"""Collects the gradients of one group in one flat buffer, filled by autograd's hooks, and says when all of them are ready.

    micro-batch 1   autograd hands over a fresh gradient  -> copied into its view once, and .grad becomes the view
    micro-batch 2+  autograd adds into .grad, that is into the view, by itself
    other dtype     (16-bit gradients, fp32 accumulation) every gradient is added into its view and dropped

Compared with zeroing the buffer and letting autograd add from the start, this moves 12 instead of 20 bytes per fp32 element. Gradients below
SMALL elements are copied together by one foreach call when the group is ready: one dispatch instead of one per tensor.

The buffer's memory is of one of three kinds:

    PersistentGrads   gradients always live: one buffer per group, n elements
    ResizedGrads      until reduced, in ordinary or device memory: the buffer's storage is resized to nothing and back
    PooledGrads       until reduced, where peers read in place: a pool for what is in flight, one being filled and one spare

Freeing means nothing for memory that peers have mapped, which is why the third kind passes it on instead. Between steps the pool keeps
buffers of at most LARGEST_KEPT bytes, as freed memory of that size stays anyway (:func:`keep_freed_memory`); larger ones are given back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.ops.dispatch import accumulate
from zero_trial.sharding.layout import Layout
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime, ReduceAt, ZeroPlan

SMALL = 1 << 14  # elements
LARGEST_KEPT = 32 << 20  # bytes


class GradBuffer:
    """The full-gradient buffer of a group, this rank's shard of it, and the count of gradients that are still to come.

    Args:
        dtype, shard_dtype: of the full buffer and of the reduced shard.
        comm: the axis along which the full buffer is summed (None: the group's own).
        pool: where full buffers come from if peers read them in place.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        dtype: torch.dtype,
        shard_dtype: torch.dtype,
        comm: AxisComm | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self.group = group
        self.dtype = dtype
        layout, device = group.layout, group.full.device
        kept = group.plan.grads is not Lifetime.USE
        self._memory = gradient_memory(
            layout, dtype, device, group.plan, comm if comm is not None else group.comm, pool
        )
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self.views = [self._nothing] * len(layout.slots)  # of the full buffer, while there is one
        low, high = layout.shard_range(group.comm.index)
        self.in_place = kept and group.plan.reduce_at is ReduceAt.BOUNDARY and shard_dtype == dtype
        self.shard = (
            self.full[low:high] if self.in_place else torch.zeros(layout.shard_numel, dtype=shard_dtype, device=device)
        )
        self.shard_filled = False  # holds a reduced sum of this step
        self.live = kept
        self._owned = False  # nobody else reads the full buffer
        self._stale = False  # padding may hold anything
        self.sealed = False  # being reduced, or reduced and not yet used: gradients that come now wait in .grad
        self.late = False  # a gradient came after the group was ready (re-entrant checkpointing): reduce only when backward has ended
        count = len(group.params)
        self.filled = [False] * count  # the view holds a gradient of this accumulation
        self._waiting: list[int] = []  # small gradients, to be copied together
        self._queued = [False] * count
        self._seen = [0] * count  # the pass in which a parameter last counted
        self._pass = 0
        self._missing = 0
        self._counting = False
        self._on_ready: Callable[[GradBuffer], None] | None = None
        self.handles: list[Any] = []
        self._shares = group.dtype == dtype  # .grad can be the view itself

    def register_hooks(self, on_ready: Callable[[GradBuffer], None]) -> None:
        """Calls ``on_ready(self)`` when every parameter of the group has got its gradient in the running backward pass."""
        self._on_ready = on_ready
        self.handles = [
            param.register_post_accumulate_grad_hook(self._hook(index, param.numel() < SMALL))
            for index, param in enumerate(self.group.params)
        ]

    @property
    def full(self) -> torch.Tensor:
        """The full buffer (n,); has no elements while it has no memory at all."""
        flat = self._memory.flat
        return flat.full if flat is not None else self._nothing

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of the full buffer; only while live."""
        low, high = self.group.layout.shard_range(self.group.comm.index)
        return self.full[low:high]

    def _hook(self, index: int, small: bool) -> Callable[[nn.Parameter], None]:
        # Weak: autograd holds hooks where Python's garbage collector does not look, so that an engine that nobody destroyed would never go.
        me = weakref.ref(self)
        seen, queued, waiting = self._seen, self._queued, self._waiting

        def on_grad(param: nn.Parameter) -> None:
            grad_buffer = me()
            if grad_buffer is None:
                return
            if small or grad_buffer.sealed:
                if not queued[index]:
                    queued[index] = True
                    waiting.append(index)
            elif param.grad is not grad_buffer.views[index]:
                grad_buffer._take(index, param)
            if not grad_buffer._counting:
                return
            if seen[index] != grad_buffer._pass:
                seen[index] = grad_buffer._pass
                grad_buffer._missing -= 1
                if not grad_buffer._missing and grad_buffer._on_ready is not None:
                    grad_buffer._on_ready(grad_buffer)
            elif not grad_buffer._missing:
                grad_buffer.late = True

        return on_grad

    def _take(self, index: int, param: nn.Parameter) -> None:
        """Moves one gradient into its view."""
        self.allocate()
        grad = param.grad
        if grad is None:
            return
        grad = _dense(grad)
        if self.filled[index]:
            accumulate(self.views[index], grad)
        else:
            self.views[index].copy_(grad)
            self.filled[index] = True
        param.grad = self.views[index] if self._shares else None

    def flush_small(self, *, show: bool = True) -> None:
        """Copies the small gradients that wait; afterwards the buffer holds all that has come (unless it is sealed).

        ``show``: the parameters' ``.grad`` become the views, for autograd to add into and for user code to read.
        """
        waiting = self._waiting
        if not waiting or self.sealed:
            return
        self.allocate()
        params, views, filled = self.group.params, self.views, self.filled
        targets, sources, again = [], [], []
        for index in waiting:
            grad = params[index].grad
            self._queued[index] = False
            if grad is None or grad is views[index]:
                continue
            if grad.is_sparse:
                grad = _dense(grad)
            if filled[index]:
                again.append((views[index], grad))
            else:
                targets.append(views[index])
                sources.append(grad)
                filled[index] = True
        if targets:
            torch._foreach_copy_(targets, sources)
        for view, grad in again:
            view.add_(grad)
        if show:
            for index in waiting:
                params[index].grad = views[index] if self._shares else None
        waiting.clear()

    @property
    def has_gradients(self) -> bool:
        """There are gradients that is not reduced yet."""
        return bool(self._waiting) or any(self.filled)

    def begin_pass(self) -> None:
        """A new backward pass: every parameter may come once more."""
        self._pass += 1
        self._missing = len(self.group.params)
        self._counting = True

    def end_pass(self) -> None:
        """The backward pass is over; what comes until the next one comes from someone else's loss and completes nothing."""
        self.flush_small()
        self._counting = False

    def allocate(self) -> None:
        """Brings the full buffer to life, with whatever the memory held: :meth:`seal` zeroes what got no gradient.

        Waits for peers that still read an earlier sum's parts there.
        """
        if self._owned:
            return
        flat = self._memory.borrow()
        self.views[:] = flat.views
        self._stale = self._stale or not self.live
        self.live = self._owned = True

    def wait_for_readers(self) -> None:
        """The reduced gradient may be written: where it lies in the full buffer, no peer reads that any more. Peers must come as far."""
        if self.in_place:
            self._memory.borrow()

    def seal(self) -> torch.Tensor:
        """Seals the full buffer for its reduction: what got no gradient is zero, and autograd no longer writes into it."""
        self.sealed = False
        self.flush_small(show=False)
        self.allocate()
        empty = [view for view, filled in zip(self.views, self.filled, strict=True) if not filled and view.numel()]
        if self._stale and (flat := self._memory.flat) is not None:
            empty += flat.padding
            self._stale = False
        if empty:
            torch._foreach_zero_(empty)
        self.detach()
        self.sealed = True
        self._owned = False
        return self.full

    def detach(self) -> None:
        """Takes the views away from the parameters: from now on a gradient that comes is a new one."""
        for param in self.group.params:
            param.grad = None
        count = len(self.filled)
        self.filled[:] = [False] * count

    def free(self) -> None:
        """Gives the full buffer's memory back, where full gradients do not always live (the shard has its own)."""
        if self.group.plan.grads is Lifetime.USE and self.live:
            self.views[:] = [self._nothing] * len(self.views)
            self._memory.give_back()
            self.live = self._owned = False

    def reset(self) -> None:
        """Forgets every gradient of this accumulation, reduced or not."""
        for index in self._waiting:
            self._queued[index] = False
        self._waiting.clear()
        self.detach()
        self.sealed = self.shard_filled = False
        self.free()

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def persistent_bytes(self) -> int:
        """Bytes of gradients that outlive a backward pass on this rank; without the pool of what is in flight."""
        full = self.group.layout.numel * self.dtype.itemsize if self.group.plan.grads is not Lifetime.USE else 0
        return full + (0 if self.in_place else self.shard.numel() * self.shard.element_size())


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Gradients of embeddings with ``sparse=True`` become dense: buffers, norms and shards have a place for every element."""
    return grad.to_dense() if grad.is_sparse else grad


@dataclass(frozen=True)
class FlatGrads:
    """A full buffer (n,), each parameter's view of it, and what no parameter covers."""

    full: torch.Tensor
    views: list[torch.Tensor]
    padding: list[torch.Tensor]


def cut(full: torch.Tensor, layout: Layout) -> FlatGrads:
    """The views and the padding that ``layout`` makes of ``full``."""
    views = [full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
    return FlatGrads(full, views, [full[start:stop] for start, stop in layout.gaps()])


class GradientMemory(Protocol):
    """The full gradients' memory of one group."""

    @property
    def flat(self) -> FlatGrads | None:
        """None while there is none."""
        ...

    def borrow(self) -> FlatGrads:
        """A place that nobody else reads or writes, with whatever it held. May wait for peers that still read there."""
        ...

    def give_back(self) -> None:
        """Its contents are needed no more; peers may still be reading them."""
        ...


class PersistentGrads:
    """A buffer that is the group's own for good."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, comm: AxisComm) -> None:
        self._comm = comm
        self.flat = cut(comm.buffer(layout.numel, dtype, device), layout)

    def borrow(self) -> FlatGrads:
        self._comm.wait_for_readers(self.flat.full)
        return self.flat

    def give_back(self) -> None:
        return None


class ResizedGrads:
    """A buffer whose storage is given back to the allocator."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = cut(torch.zeros(layout.numel, dtype=dtype, device=device), layout)
        self._bytes = layout.numel * dtype.itemsize
        self.give_back()

    def borrow(self) -> FlatGrads:
        self.flat.full.untyped_storage().resize_(self._bytes)
        return self.flat

    def give_back(self) -> None:
        self.flat.full.untyped_storage().resize_(0)


class PooledGrads:
    """A buffer of ``pool``, while it is needed."""

    def __init__(self, layout: Layout, dtype: torch.dtype, pool: BufferPool) -> None:
        self._layout = layout
        self._dtype = dtype
        self._pool = pool
        self._pooled: PooledBuffer | None = None
        self.flat: FlatGrads | None = None

    def borrow(self) -> FlatGrads:
        nbytes = self._layout.numel * self._dtype.itemsize
        if self._pooled is None:
            self._pooled = self._pool.take(nbytes)
        else:
            self._pool.wait_for_readers(self._pooled)

        def make(buffer: torch.Tensor) -> FlatGrads:
            return cut(buffer[:nbytes].view(self._dtype), self._layout)

        self.flat = self._pooled.flat(id(self), make)
        return self.flat

    def give_back(self) -> None:
        pooled, self._pooled, self.flat = self._pooled, None, None
        if pooled is not None:
            self._pool.give_back(pooled)


@dataclass(eq=False)
class PooledBuffer:
    """A buffer (bytes), and the views that groups have cut from it: they are used again in every step."""

    buffer: torch.Tensor
    _cuts: dict[Hashable, FlatGrads] = field(default_factory=dict)

    def flat(self, key: Hashable, make: Callable[[torch.Tensor], FlatGrads]) -> FlatGrads:
        if key not in self._cuts:
            self._cuts[key] = make(self.buffer)
        return self._cuts[key]


class BufferPool:
    """Buffers of ``comm`` for the gradients in flight. At most ``most`` that fit a group, unless more are in use at once."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._comm = comm
        self._most = most
        self._taken: list[PooledBuffer] = []
        self._left: list[PooledBuffer] = []  # given back, the longest ago first

    def take(self, nbytes: int) -> PooledBuffer:
        """A buffer of at least ``nbytes``, and not of more than twice that. Where there are ``most`` already and peers still read all that were
        given back, it waits for the first of those."""

        def fits(pooled: PooledBuffer) -> bool:
            return nbytes <= pooled.buffer.numel() <= 2 * nbytes

        left = [pooled for pooled in self._left if fits(pooled)]
        found = next((pooled for pooled in left if not self._comm.has_readers(pooled.buffer)), None)
        if found is None and left and len(left) + sum(map(fits, self._taken)) >= self._most:
            found = left[0]
            self.wait_for_readers(found)
        if found is None:
            found = PooledBuffer(self._comm.buffer(nbytes, torch.uint8, torch.device("cpu")))
        else:
            self._left.remove(found)
        self._taken.append(found)
        self._drop_large()
        return found

    def give_back(self, pooled: PooledBuffer) -> None:
        self._taken.remove(pooled)
        self._left.append(pooled)
        self._drop_large()

    def wait_for_readers(self, pooled: PooledBuffer) -> None:
        """Returns when no peer reads ``pooled``."""
        self._comm.wait_for_readers(pooled.buffer)

    def buffers(self) -> list[torch.Tensor]:
        """All that there are now."""
        return [pooled.buffer for pooled in (*self._taken, *self._left)]

    def _drop_large(self) -> None:
        """Gives large buffers that are not in use back to the system."""
        self._left = [
            pooled
            for pooled in self._left
            if pooled.buffer.numel() <= LARGEST_KEPT or self._comm.has_readers(pooled.buffer)
        ]


def gradient_memory(
    layout: Layout, dtype: torch.dtype, device: torch.device, plan: ZeroPlan, comm: AxisComm, pool: BufferPool | None
) -> GradientMemory:
    """The kind that suits: by how long full gradients live, and by whether there is a pool."""
    if plan.grads is not Lifetime.USE:
        return PersistentGrads(layout, dtype, device, comm)
    return PooledGrads(layout, dtype, pool) if pool is not None else ResizedGrads(layout, dtype, device)
