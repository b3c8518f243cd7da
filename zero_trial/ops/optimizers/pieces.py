"""The pieces of one parameter group that have gradients, with their state, ready for torch._foreach_*."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero_trial.errors import ConfigError

Closure = Callable[[], Any]


class PieceWork(NamedTuple):
    """What one pass over a piece reads and writes: ``gradient`` and ``out`` have the weight's number of elements and
    any floating dtype."""

    weight: Tensor
    gradient: Tensor
    out: Tensor | None  # receives the new weight, rounded to its own dtype
    group: int  # index into param_groups


class Gate(NamedTuple):
    """What a step reads from the device instead of being told by the host: one-element fp32 tensors.

    ``factor`` multiplies the gradients; where ``found_inf`` is not 0 the update changes no element (None: it always goes on).
    """

    factor: Tensor
    found_inf: Tensor | None


class PieceOptimizer(torch.optim.Optimizer):
    """Base of our optimizers: ``grad_multiplier`` is read in every step and multiplies the gradients inside the update.

    Unscaling (1 / loss scale) and clipping are both one factor for all gradients, so they cost no pass of their own.
    """

    elementwise: bool = True
    fuses: bool = False  # can do ``work``: gradients and rounded weights of 16 bits, read and written in its one pass
    work: Sequence[PieceWork] | None = None  # where set, :meth:`step` updates these pieces and looks at no ``.grad``
    grad_multiplier: float = 1.0
    gate: Gate | None = None  # where set, the device decides; only for optimizers that have ``fuses``

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, without what torch wraps around it: that imports all of torch.compile, a second of CPU on every rank, so that
        a compiler does not look into a function that no compiled graph calls."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Update every piece that has a gradient, in place; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        self._mark_changed()
        return loss

    def _mark_changed(self) -> None:
        """The ops write behind autograd's back: a graph that still needs an old weight must be told, and fails as it does with torch's own."""
        written = (tensor for item in self.waiting() for tensor in (item.weight, item.out) if tensor is not None)
        increment_version([tensor for tensor in written if not tensor.is_inference()])

    def update(self) -> None:
        raise NotImplementedError

    def waiting(self) -> Iterable[PieceWork]:
        """What this step is to update: :attr:`work`, else every piece that has a gradient."""
        return self._with_gradients() if self.work is None else self.work

    def _with_gradients(self) -> Iterator[PieceWork]:
        for index, group in enumerate(self.param_groups):
            for piece in group["params"]:
                if piece.grad is not None:
                    if piece.grad.layout is not torch.strided:
                        raise ConfigError(
                            f"{type(self).__name__} does not take sparse gradients",
                            got=f"{piece.grad.layout} for a parameter of shape {tuple(piece.shape)}",
                            fix="Build the embedding with sparse=False, or use torch.optim.SparseAdam for it.",
                        )
                    yield PieceWork(piece, piece.grad, None, index)

    def flags(self) -> tuple[Tensor | None, Tensor | None]:
        """``found_inf`` and ``factor`` as the ops over many tensors take them."""
        return (None, None) if self.gate is None else (self.gate.found_inf, self.gate.factor)

    def pieces(self, group: Mapping[str, Any], moments: tuple[str, ...]) -> list[Tensor]:
        """The group's pieces with gradients; the named moments of each are created as zeros where missing."""
        found = [piece for piece in group["params"] if piece.grad is not None]
        for piece in found:
            state = self.state[piece]
            for name in moments:
                if name not in state:
                    state[name] = torch.zeros_like(piece, memory_format=torch.preserve_format)
        return found

    def moment(self, pieces: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[piece][name] for piece in pieces]


def gradients(pieces: list[Tensor]) -> list[Tensor]:
    """The gradients of pieces that have one, in the same order."""
    return [piece.grad for piece in pieces if piece.grad is not None]
