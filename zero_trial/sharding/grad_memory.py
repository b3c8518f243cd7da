"""The memory of full gradients, by how long they live.

PersistentGrads   gradients always live: one buffer per group, n elements
ResizedGrads      until reduced, in ordinary or device memory: the buffer's storage is resized
                  to nothing and back
SharedGrads       until reduced, in memory that peers read in place, which cannot be resized: a
                  new buffer each time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from zero_trial.comm import AxisComm
from zero_trial.sharding.layout import Layout
from zero_trial.sharding.plan import Lifetime, ZeroPlan


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
        """Return memory with whatever it held."""
        ...

    def give_back(self) -> None:
        """Give the memory up."""
        ...


class PersistentGrads:
    """A buffer that belongs to the group permanently."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, comm: AxisComm) -> None:
        self.flat = cut(comm.buffer(layout.numel, dtype, device).zero_(), layout)

    def borrow(self) -> FlatGrads:
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


class SharedGrads:
    """A buffer of ``comm``, while it is needed."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, comm: AxisComm) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._comm = comm
        self.flat: FlatGrads | None = None

    def borrow(self) -> FlatGrads:
        self.flat = cut(self._comm.buffer(self._layout.numel, self._dtype, self._device), self._layout)
        return self.flat

    def give_back(self) -> None:
        self.flat = None


def gradient_memory(
    layout: Layout, dtype: torch.dtype, device: torch.device, plan: ZeroPlan, comm: AxisComm
) -> GradientMemory:
    """Choose the kind of memory by how long full gradients live, and by whether peers read it in
    place."""
    if plan.grads is not Lifetime.USE:
        return PersistentGrads(layout, dtype, device, comm)
    if comm.shares_memory(device):
        return SharedGrads(layout, dtype, device, comm)
    return ResizedGrads(layout, dtype, device)
