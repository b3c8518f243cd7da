"""The base of our optimizers, and one optimizer step with all gradients multiplied by a factor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero_trial.errors import ConfigError

Closure = Callable[[], Any]


class ShardUpdate(NamedTuple):
    """What one pass over a piece reads and writes: ``gradient`` and ``out`` have the weight's number of elements and
    any floating dtype."""

    weight: Tensor
    gradient: Tensor
    out: Tensor | None  # receives the new weight, rounded to its own dtype
    group: int  # index into param_groups


class DeviceScalars(NamedTuple):
    """What a step reads from the device instead of being told by the host: one-element fp32 tensors.

    ``factor`` multiplies the gradients; where ``found_inf`` is not 0 the update changes no element (None: it always goes on).
    """

    factor: Tensor
    found_inf: Tensor | None


class ShardOptimizer(torch.optim.Optimizer):
    """Base of our optimizers: ``grad_multiplier`` is read in every step and multiplies the gradients inside the update.

    Unscaling (1 / loss scale) and clipping are both one factor for all gradients, so they cost no pass of their own.
    """

    elementwise: bool = True
    fuses: bool = False  # can do ``work``: gradients and rounded weights of 16 bits, read and written in its one pass
    work: Sequence[ShardUpdate] | None = None  # where set, :meth:`step` updates these pieces and looks at no ``.grad``
    grad_multiplier: float = 1.0
    gate: DeviceScalars | None = None  # where set, the device decides; only for optimizers that have ``fuses``

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

    def waiting(self) -> Iterable[ShardUpdate]:
        """What this step is to update: :attr:`work`, else every piece that has a gradient."""
        return self._with_gradients() if self.work is None else self.work

    def _with_gradients(self) -> Iterator[ShardUpdate]:
        for index, group in enumerate(self.param_groups):
            for piece in group["params"]:
                if piece.grad is not None:
                    if piece.grad.layout is not torch.strided:
                        raise ConfigError(
                            f"{type(self).__name__} does not take sparse gradients",
                            got=f"{piece.grad.layout} for a parameter of shape {tuple(piece.shape)}",
                            fix="Build the embedding with sparse=False, or use torch.optim.SparseAdam for it.",
                        )
                    yield ShardUpdate(piece, piece.grad, None, index)

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


# --- one step with a factor -------------------------------------------------------------------------------------------
#
# The gradients are multiplied by a number, without a pass over them where the optimizer can do it.
# Unscaling and clipping are one factor: (1 / loss scale) * min(1, limit / norm). Three ways, by what the optimizer is:
#
#     ours (FusedAdam, FusedLamb ...) the factor goes into the update                          no extra bytes
#     torch's fused Adam, AdamW,      the kernel divides by its ``grad_scale`` as it reads     no extra bytes (the scaled
#     SGD, Adagrad                                                                             gradient is written back)
#     anything else                   the gradients are multiplied in place first              8 bytes per fp32 gradient
#
# The first two can also be told by the device, through a :class:`DeviceScalars`: factor and skip are read where the update runs, and the host
# waits for nothing. What such a step has advanced on the host is put back by :func:`undo_step`, once it is known that it was skipped.


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def scaled_step(optimizer: torch.optim.Optimizer, multiplier: float = 1.0) -> None:
    """``optimizer.step()`` on ``multiplier`` times the gradients. The gradients' own values after the step are
    undefined.

    A multiplier of exactly 1 is a plain step, so an unclipped fp32 run has the bits of torch's own optimizer.
    """
    if multiplier == 1.0:
        optimizer.step()
    elif isinstance(optimizer, ShardOptimizer):
        optimizer.grad_multiplier = multiplier
        try:
            optimizer.step()
        finally:
            optimizer.grad_multiplier = 1.0
    elif multiplier != 0.0 and divides_in_kernel(optimizer):
        device = next((piece.device for group in optimizer.param_groups for piece in group["params"]), "cpu")
        _told(optimizer, grad_scale=torch.full((), 1.0 / multiplier, dtype=torch.float32, device=device))
    else:
        _multiply_gradients(optimizer, multiplier)
        optimizer.step()


def fused_step(
    optimizer: ShardOptimizer, work: Sequence[ShardUpdate], multiplier: float, gate: DeviceScalars | None = None
) -> None:
    """``optimizer.step()`` on the pieces of ``work`` alone, each in one pass that reads its gradient, multiplies it,
    and writes the weight and its rounded copy. For optimizers that have ``fuses``. ``gate`` multiplies on top, and may skip."""
    optimizer.work, optimizer.grad_multiplier, optimizer.gate = work, multiplier, gate
    try:
        optimizer.step()
    finally:
        optimizer.work, optimizer.grad_multiplier, optimizer.gate = None, 1.0, None


def device_scaled_step(optimizer: torch.optim.Optimizer, divisor: Tensor, found_inf: Tensor | None) -> None:
    """``optimizer.step()`` of one for which :func:`divides_in_kernel` holds, on its gradients divided by ``divisor``, skipped where
    ``found_inf`` is not 0. Both are fp32 scalar tensors beside the weights; the host reads neither."""
    _told(optimizer, grad_scale=divisor, **({} if found_inf is None else {"found_inf": found_inf}))


def supports_device_scalars(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the device can tell a step of ``optimizer`` its factor, and to change nothing."""
    return (isinstance(optimizer, ShardOptimizer) and optimizer.fuses) or divides_in_kernel(optimizer)


def undo_step(optimizer: torch.optim.Optimizer, known: int) -> None:
    """The device has skipped the last step: what the host has advanced is as before it, when ``known`` weights had state.

    State that was made for it goes. Counts of steps on the host go back by one; torch's fused optimizers keep theirs right themselves.
    """
    weights = list(optimizer.state)  # in the order in which their states were made
    for weight in weights[known:]:
        del optimizer.state[weight]
    if isinstance(optimizer, ShardOptimizer):
        for weight in weights[:known]:
            state = optimizer.state[weight]
            if "step" in state:
                state["step"] = state["step"] - 1


def divides_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's own classes (not subclasses, whose step may differ) with the fused kernel in every group. The divisor is fp32: it would
    round a float64 gradient."""
    if type(optimizer) not in _FUSED or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return all(piece.dtype != torch.float64 for group in optimizer.param_groups for piece in group["params"])


def _told(optimizer: Any, **scalars: Tensor) -> None:
    """A step with the attributes that torch.amp.GradScaler sets on the same optimizers, for the length of one step."""
    for name, value in scalars.items():
        setattr(optimizer, name, value)
    try:
        optimizer.step()
    finally:
        for name in scalars:
            delattr(optimizer, name)


def _multiply_gradients(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            gradients = [piece.grad for piece in group["params"] if piece.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, multiplier)
