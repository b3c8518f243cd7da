"""The memory of full gradients, by how long they live.

    PersistentGrads   gradients always live: one buffer per group, n elements
    ResizedGrads      until reduced, in ordinary or device memory: the buffer's storage is resized
                      to nothing and back
    PooledGrads       until reduced, where peers read in place: a pool for what is in flight, one
                      being filled and one spare

Memory that peers have mapped cannot be resized, which is why the third kind passes it on instead.
Between steps the pool gives its buffers up, but for a few small ones whose views would cost more
time to make again than they take. The pages of those of at most LARGEST_KEPT bytes stay with the
process for the next step, unless gradients are to be None between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero_trial.comm import AxisComm
from zero_trial.sharding.layout import Layout
from zero_trial.sharding.plan import Lifetime, ZeroPlan

LARGEST_KEPT = 32 << 20  # bytes
_SMALL = 4 << 20  # bytes of a pool's buffers that live between steps


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
        self.flat = cut(torch.empty(layout.numel, dtype=dtype, device=device), layout)
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
    """Buffers of ``comm`` for the gradients in flight, and for their casts. At most ``most`` that
    fit a group, unless more are in use at once. ``keeps``: their pages stay with the process
    between steps, until :meth:`close`; those of a pool that was dropped, until another engine is
    built or closed.
    """

    def __init__(self, comm: AxisComm, most: int, *, keeps: bool = True) -> None:
        self._comm = comm
        self._most = most
        self._keeps = keeps
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
                keep = self._keeps and nbytes <= LARGEST_KEPT
                found = PooledBuffer(self._comm.buffer(nbytes, torch.uint8, torch.device("cpu"), keep=keep))
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

    def trim(self) -> None:
        """Give up the buffers that are not in use: a step is over, no peer reads gradients any
        more."""
        room, left = _SMALL if self._keeps else 0, []
        for pooled in sorted(self._left, key=lambda one: one.buffer.numel()):
            room -= pooled.buffer.numel()
            if room >= 0:
                left.append(pooled)
        self._left = left

    def close(self) -> None:
        """Give everything that is not in use back to the system."""
        self._left.clear()
        self._comm.free_kept()

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
