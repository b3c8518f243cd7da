"""How the inputs of a checkpointed function are kept until backward: whole, cut over the model-parallel ranks, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class ModelAxis(Protocol):
    """The model-parallel ranks, whose inputs are equal: what partitioning needs of a mesh axis."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Any:
        """Puts every rank's ``shard`` in rank order into ``full``; the result has ``wait()``."""


@dataclass(frozen=True)
class Kept:
    """One saved tensor: ``data`` is the tensor itself, or this rank's part of it, perhaps on the host."""

    data: torch.Tensor
    shape: torch.Size
    device: torch.device
    cut: bool


class SavedInputs:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks.

    With ``axis``, a floating tensor of n elements costs n/M on each of its M ranks, and an all-gather in backward: every rank of the axis must
    run backward through the same checkpoints. ``to_host`` moves what is left off the device.
    """

    def __init__(self, axis: ModelAxis | None, to_host: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._axis = axis if axis is not None and axis.size > 1 else None
        self._to_host = to_host

    def pack(self, tensor: torch.Tensor) -> Kept:
        data, cut = tensor, False
        if self._axis is not None and tensor.is_floating_point() and tensor.numel() >= self._axis.size:
            data, cut = self._part(tensor, self._axis), True
        if self._to_host is not None:
            data = self._to_host(data)
        return Kept(data, tensor.shape, tensor.device, cut)

    def unpack(self, kept: Kept) -> torch.Tensor:
        data = kept.data.to(kept.device, non_blocking=True)
        if not kept.cut or self._axis is None:
            return data
        full = torch.empty(data.numel() * self._axis.size, dtype=data.dtype, device=data.device)
        self._axis.all_gather(full, data, "saved activations").wait()
        return full[: kept.shape.numel()].view(kept.shape)

    def _part(self, tensor: torch.Tensor, axis: ModelAxis) -> torch.Tensor:
        """This rank's slice of the flat values, padded so that all slices are equally long."""
        flat = tensor.detach().reshape(-1)
        length = -(-flat.numel() // axis.size)
        own = flat[axis.index * length : (axis.index + 1) * length]
        part = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
        part[: own.numel()].copy_(own)
        return part


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory; a tensor that is on the host stays as it is. Ordered by the current stream, without waiting for it."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)
