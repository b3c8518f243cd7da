"""Collects the gradients of one group in one flat buffer, filled by autograd's hooks, and reports
when all of them are ready.

    micro-batch 1   autograd hands over a fresh gradient  -> copied into its view once, and .grad
                                                          becomes the view
    micro-batch 2+  autograd adds into .grad, that is into the view, by itself
    other dtype     (16-bit gradients, fp32 accumulation) every gradient is added into its view and
                    dropped

Compared with zeroing the buffer and letting autograd add from the start, this moves 12 instead of
20 bytes per fp32 element. Gradients below SMALL elements are copied together by one foreach call
when the group is ready: one dispatch instead of one per tensor.

The buffer's memory is of one of three kinds:

    PersistentGrads   gradients always live: one buffer per group, n elements
    ResizedGrads      until reduced, in ordinary or device memory: the buffer's storage is resized
                      to nothing and back
    PooledGrads       until reduced, where peers read in place: a pool for what is in flight, one
                      being filled and one spare

Memory that peers have mapped cannot be freed, which is why the third kind passes it on instead.
Between steps the pool keeps buffers of at most LARGEST_KEPT bytes, as freed memory of that size
stays anyway (:func:`keep_freed_memory`); larger ones are given back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.ops.dispatch import accumulate
from zero_trial.sharding.freed import unasked
from zero_trial.sharding.layout import Layout
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime, ReduceAt, ZeroPlan

SMALL = 1 << 14  # elements
LARGEST_KEPT = 32 << 20  # bytes


class GradBuffer:
    """The full-gradient buffer of a group, this rank's shard of it, and the count of gradients that
    are still to come.

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
        self._frees = not kept
        self._owned = False  # no peer reads the full buffer
        self._stale = False  # padding may hold anything
        # closed to writes from the reduction's start until the step; later gradients stay in
        # param.grad
        self.sealed = False
        # a gradient came after the group was ready (re-entrant checkpointing): reduce only when
        # backward has ended
        self.late = False
        count = len(group.params)
        self.filled = [False] * count  # the view holds a gradient of this accumulation
        self._waiting: list[int] = []  # small gradients, to be copied together
        self._queued = [False] * count
        self._seen = [0] * count  # the pass in which a parameter last counted
        self._pass = 0
        self._missing = 0
        self._counting = False
        self._on_ready: Callable[[GradBuffer], None] | None = None
        self._on_foreign: Callable[[bool], None] | None = None
        # what the gradients of the running pass are multiplied by, and by index what .grad held
        # before it
        self._factor = 1.0
        self._kept: dict[int, torch.Tensor] = {}
        self._examines = False  # gradients that come now need more than to be copied
        self.handles: list[Any] = []
        self._shares = group.dtype == dtype  # .grad can be the view itself

    def register_hooks(self, on_ready: Callable[[GradBuffer], None]) -> None:
        """Call ``on_ready(self)`` when every parameter of the group has got its gradient in the
        running backward pass."""
        self._on_ready = on_ready
        self.handles = [
            param.register_post_accumulate_grad_hook(self._hook(index, param.numel() < SMALL))
            for index, param in enumerate(self.group.params)
        ]

    def on_foreign_gradient(self, call: Callable[[bool], None]) -> None:
        """Call ``call(added)`` for every gradient that comes outside of a pass of this model's own;
        ``added``: autograd has added it into the buffer already. The call may begin a pass."""
        self._on_foreign = call
        self._examines = True

    @property
    def full(self) -> torch.Tensor:
        """The full buffer (n,); has no elements while it has no memory at all."""
        flat = self._memory.flat
        return flat.full if flat is not None else self._nothing

    def _hook(self, index: int, small: bool) -> Callable[[nn.Parameter], None]:
        # Weak: autograd holds hooks where Python's garbage collector does not look, so that an
        # engine that was not destroyed would never be freed.
        me = weakref.ref(self)
        seen, queued, waiting = self._seen, self._queued, self._waiting

        def on_grad(param: nn.Parameter) -> None:
            grad_buffer = me()
            if grad_buffer is None:
                return
            if grad_buffer._examines:
                grad_buffer._examine(index, param)
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

    def _examine(self, index: int, param: nn.Parameter) -> None:
        """Report a gradient that comes outside of a pass, and multiply it where its pass says
        so."""
        grad = param.grad
        if not self._counting and self._on_foreign is not None:
            self._on_foreign(self._queued[index] or (self.filled[index] and grad is self.views[index]))
            grad = param.grad if param.grad is not None else self._kept.get(index)
        if self._factor == 1.0 or grad is None:
            return
        kept = self._kept.pop(index, None)
        with torch.no_grad():
            grad.mul_(self._factor)
            param.grad = grad if kept is None or kept is grad else kept.add_(grad)

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that come from now on, until :meth:`end_pass`, by ``factor``; what
        has come stays."""
        self._restore()
        self._factor = factor
        self._examines = factor != 1.0 or self._on_foreign is not None
        if factor != 1.0:
            with unasked():
                for index, param in enumerate(self.group.params):
                    if param.grad is not None:
                        self._kept[index], param.grad = param.grad, None

    def _restore(self) -> None:
        """Give parameters that no gradient has reached what ``.grad`` held before the pass."""
        with unasked():
            for index, grad in self._kept.items():
                self.group.params[index].grad = grad
        self._kept.clear()
        self._factor = 1.0

    def _take(self, index: int, param: nn.Parameter) -> None:
        """Move one gradient into its view."""
        if not self._owned:
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
        """Copy the small gradients that wait; afterwards the buffer holds all that has come (unless
        it is sealed).

        ``show``: the parameters' ``.grad`` become the views, for autograd to add into and for user
            code to read.
        """
        waiting = self._waiting
        if not waiting or self.sealed:
            return
        if not self._owned:
            self.allocate()
        params, views, filled = self.group.params, self.views, self.filled
        targets, sources, again = [], [], []
        with unasked():
            grads = [params[index].grad for index in waiting]
        for index, grad in zip(waiting, grads, strict=True):
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
            with unasked():
                for index in waiting:
                    params[index].grad = views[index] if self._shares else None
        waiting.clear()

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return bool(self._waiting) or any(self.filled)

    def begin_pass(self) -> None:
        """Start a new backward pass: every parameter is expected once more."""
        self._pass += 1
        self._missing = len(self.group.params)
        self._counting = True
        self._examines = self._factor != 1.0

    def end_pass(self) -> None:
        """End the backward pass: gradients that come until the next one belong to other losses and
        complete nothing."""
        if self._factor != 1.0:
            self._restore()
        if self._waiting:
            self.flush_small()
        self._counting = False
        self._examines = self._on_foreign is not None

    def allocate(self) -> FlatGrads:
        """Give the full buffer memory, with whatever that held: :meth:`seal` zeroes what got no
        gradient.

        Waits for peers that still read an earlier sum's parts there.
        """
        flat = self._memory.borrow()
        self.views[:] = flat.views
        self._stale = self._stale or not self.live
        self.live = self._owned = True
        return flat

    def wait_for_readers(self) -> None:
        """Wait until the reduced gradient may be written: where it is in the full buffer, peers may
        be reading it. Peers must come as far."""
        if self.in_place:
            self._memory.borrow()

    def seal(self) -> torch.Tensor:
        """Return the full buffer (n,) for its reduction: what got no gradient is zero, and autograd
        no longer writes into it."""
        self.sealed = False
        if self._waiting:
            self.flush_small(show=False)
        flat = self._memory.flat if self._owned else None
        if flat is None:
            flat = self.allocate()
        empty: list[torch.Tensor] = []
        if not all(self.filled):
            empty = [view for view, filled in zip(self.views, self.filled, strict=True) if not filled and view.numel()]
        if self._stale:
            empty += flat.padding
            self._stale = False
        if empty:
            torch._foreach_zero_(empty)
        self.detach()
        self.sealed = True
        self._owned = False
        return flat.full

    def end_reduction(self) -> None:
        """Note that the shard holds a reduced sum; free the full buffer where full gradients do not
        always live."""
        self.shard_filled = True
        if self.group.plan.reduce_at is ReduceAt.MICRO:
            self.sealed = False
        if self._frees and self.live:
            self.free()

    def detach(self) -> None:
        """Take the views away from the parameters: autograd makes a new gradient next time."""
        with unasked():
            for param in self.group.params:
                param.grad = None
        count = len(self.filled)
        self.filled[:] = [False] * count

    def free(self) -> None:
        """Give the full buffer's memory back, where full gradients do not always live (the shard
        has its own)."""
        if self._frees and self.live:
            self.views[:] = [self._nothing] * len(self.views)
            self._memory.give_back()
            self.live = self._owned = False

    def reset(self) -> None:
        """Drop every gradient of this accumulation, reduced or not."""
        for index in self._waiting:
            self._queued[index] = False
        self._waiting.clear()
        self._kept.clear()
        self.detach()
        self.sealed = self.shard_filled = False
        if self._frees and self.live:
            self.free()

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def persistent_bytes(self) -> int:
        """Count the bytes of gradients that outlive a backward pass on this rank, without the pool
        of what is in flight."""
        full = 0 if self._frees else self.group.layout.numel * self.dtype.itemsize
        return full + (0 if self.in_place else self.shard.numel() * self.shard.element_size())


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient for embeddings with ``sparse=True``: buffers, norms and shards have a
    place for every element."""
    return grad.to_dense() if grad.is_sparse else grad


@dataclass(frozen=True)
class FlatGrads:
    """A full buffer (n,), each parameter's view of it, and the parts that no parameter covers."""

    full: torch.Tensor
    views: list[torch.Tensor]
    padding: list[torch.Tensor]


def cut(full: torch.Tensor, layout: Layout) -> FlatGrads:
    """Cut ``full`` (n,) into the views and the padding of ``layout``."""
    views = [full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
    return FlatGrads(full, views, [full[start:stop] for start, stop in layout.gaps()])


class GradientMemory(Protocol):
    """The full gradients' memory of one group."""

    @property
    def flat(self) -> FlatGrads | None:
        """The buffer; None while it has no memory."""
        ...

    def borrow(self) -> FlatGrads:
        """Return memory that no peer reads, with whatever it held. May wait for peers that still
        read there."""
        ...

    def give_back(self) -> None:
        """Give the memory up. Peers may still be reading it."""
        ...


class PersistentGrads:
    """A buffer that belongs to the group for good."""

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

        flat = self._pooled.cuts.get(id(self))
        if flat is None:
            flat = self._pooled.cuts[id(self)] = cut(self._pooled.buffer[:nbytes].view(self._dtype), self._layout)
        self.flat = flat
        return flat

    def give_back(self) -> None:
        pooled, self._pooled, self.flat = self._pooled, None, None
        if pooled is not None:
            self._pool.give_back(pooled)


@dataclass(eq=False)
class PooledBuffer:
    """A buffer (bytes), and by id of their PooledGrads the views that groups have cut from it: they
    are used again in every step."""

    buffer: torch.Tensor
    cuts: dict[int, FlatGrads] = field(default_factory=dict)


class BufferPool:
    """Buffers of ``comm`` for the gradients in flight. At most ``most`` that fit a group, unless
    more are in use at once."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._comm = comm
        self._most = most
        self._taken: list[PooledBuffer] = []
        self._left: list[PooledBuffer] = []  # given back, the longest ago first
        self._largest = 0  # bytes

    def take(self, nbytes: int) -> PooledBuffer:
        """Return a buffer of ``nbytes`` to twice that.

        Where there are ``most`` already, and peers still read all that were given back, it waits
        for the first of those.
        """
        left = []
        for pooled in self._left:
            if nbytes <= pooled.buffer.numel() <= 2 * nbytes:
                left.append(pooled)
                if not self._comm.has_readers(pooled.buffer):
                    found = pooled
                    break
        else:
            used = len(left) + sum(nbytes <= pooled.buffer.numel() <= 2 * nbytes for pooled in self._taken)
            if left and used >= self._most:
                found = left[0]
                self.wait_for_readers(found)
            else:
                found = PooledBuffer(self._comm.buffer(nbytes, torch.uint8, torch.device("cpu")))
                self._left.append(found)
                self._largest = max(self._largest, found.buffer.numel())
        self._left.remove(found)
        self._taken.append(found)
        if self._largest > LARGEST_KEPT:
            self._drop_large()
        return found

    def give_back(self, pooled: PooledBuffer) -> None:
        """Let others take the buffer. Peers may still be reading it."""
        self._taken.remove(pooled)
        self._left.append(pooled)
        if self._largest > LARGEST_KEPT:
            self._drop_large()

    def wait_for_readers(self, pooled: PooledBuffer) -> None:
        """Return when no peer reads ``pooled``."""
        self._comm.wait_for_readers(pooled.buffer)

    def buffers(self) -> list[torch.Tensor]:
        """List all buffers that exist now."""
        return [pooled.buffer for pooled in (*self._taken, *self._left)]

    def _drop_large(self) -> None:
        """Give large buffers that are not in use back to the system."""
        self._left = [
            pooled
            for pooled in self._left
            if pooled.buffer.numel() <= LARGEST_KEPT or self._comm.has_readers(pooled.buffer)
        ]


def gradient_memory(
    layout: Layout, dtype: torch.dtype, device: torch.device, plan: ZeroPlan, comm: AxisComm, pool: BufferPool | None
) -> GradientMemory:
    """Choose the kind of memory by how long full gradients live, and by whether there is a pool."""
    if plan.grads is not Lifetime.USE:
        return PersistentGrads(layout, dtype, device, comm)
    return PooledGrads(layout, dtype, pool) if pool is not None else ResizedGrads(layout, dtype, device)
