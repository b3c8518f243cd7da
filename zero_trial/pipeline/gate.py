"""A gate: where received tensors enter a chunk's graph, and where their gradients come out of it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from zero_trial.pipeline.parcel import Parcel, map_tensors


class Gate:
    """The inputs of one chunk and micro-batch. :meth:`open` lets them in; ``gradients`` is filled by the backward pass.

    What comes out of :meth:`open` is no leaf and no view, so the first layer may work in place, and nothing is copied.
    """

    def __init__(self, parcel: Parcel, anchor: torch.Tensor) -> None:
        self.anchor = anchor
        self.gradients: tuple[torch.Tensor | None, ...] = (None,) * sum(parcel.differentiable)
        self.node: Node | None = None
        self._parcel: Parcel | None = parcel

    def open(self) -> Any:
        """The value, its tensors joined to the graph where gradients are wanted. Once."""
        parcel, self._parcel = self._parcel, None
        if parcel is None:
            return None
        inside = parcel.wanted()
        if not inside:
            return parcel.value
        joined: Sequence[torch.Tensor] = _Join.apply(self.anchor, self, inside)  # type: ignore[no-untyped-call]
        self.node = joined[0].grad_fn
        by_id = {id(tensor): new for tensor, new in zip(inside, joined, strict=True)}
        return map_tensors(parcel.value, lambda tensor: by_id.get(id(tensor), tensor))

    def take(self) -> list[torch.Tensor | None]:
        """The gradients, in the order of the tensors that wanted one. Once."""
        found, self.gradients = list(self.gradients), ()
        return found


class _Join(torch.autograd.Function):
    """Makes the tensors outputs of a node whose backward hands their gradients to the gate. The anchor only makes it part of a graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, gate: Gate, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.gate.gradients = gradients
        return None, None, None


def outside(value: Any) -> Any:
    """The same value with its tensors outside any graph; they share memory."""
    return map_tensors(value, torch.Tensor.detach)


def handed_over(value: Any) -> Parcel:
    """``value`` as if it had been sent to this rank: its tensors outside any graph, in order, with whether gradients are wanted back."""
    parcel = Parcel(None)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        parcel.tensors.append(tensor.detach())
        parcel.differentiable.append(tensor.requires_grad)
        return parcel.tensors[-1]

    parcel.value = map_tensors(value, take)
    return parcel
