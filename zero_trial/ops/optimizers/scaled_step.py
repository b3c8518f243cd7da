"""One optimizer step with all gradients multiplied by a number, without a pass over them where the optimizer can do it.

Unscaling and clipping are one factor: (1 / loss scale) * min(1, limit / norm). Three ways, by what the optimizer is:

    ours (FusedAdam, FusedLamb ...) the factor goes into the update                          no extra bytes
    torch's fused Adam, AdamW,      the kernel divides by its ``grad_scale`` as it reads     no extra bytes (the scaled
    SGD, Adagrad                                                                             gradient is written back)
    anything else                   the gradients are multiplied in place first              8 bytes per fp32 gradient

The first two can also be told by the device, through a :class:`Gate`: factor and skip are read where the update runs, and the host
waits for nothing. What such a step has advanced on the host is put back by :func:`take_back`, once it is known that it was skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.ops.optimizers.pieces import Gate, PieceOptimizer, PieceWork

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def scaled_step(optimizer: torch.optim.Optimizer, multiplier: float = 1.0) -> None:
    """``optimizer.step()`` on ``multiplier`` times the gradients. The gradients' own values after the step are
    undefined.

    A multiplier of exactly 1 is a plain step, so an unclipped fp32 run has the bits of torch's own optimizer.
    """
    if multiplier == 1.0:
        optimizer.step()
    elif isinstance(optimizer, PieceOptimizer):
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
    optimizer: PieceOptimizer, work: Sequence[PieceWork], multiplier: float, gate: Gate | None = None
) -> None:
    """``optimizer.step()`` on the pieces of ``work`` alone, each in one pass that reads its gradient, multiplies it,
    and writes the weight and its rounded copy. For optimizers that have ``fuses``. ``gate`` multiplies on top, and may skip."""
    optimizer.work, optimizer.grad_multiplier, optimizer.gate = work, multiplier, gate
    try:
        optimizer.step()
    finally:
        optimizer.work, optimizer.grad_multiplier, optimizer.gate = None, 1.0, None


def gated_step(optimizer: torch.optim.Optimizer, divisor: Tensor, found_inf: Tensor | None) -> None:
    """``optimizer.step()`` of one for which :func:`divides_in_kernel` holds, on its gradients divided by ``divisor``, skipped where
    ``found_inf`` is not 0. Both are fp32 scalar tensors beside the weights; the host reads neither."""
    _told(optimizer, grad_scale=divisor, **({} if found_inf is None else {"found_inf": found_inf}))


def takes_gates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the device can tell a step of ``optimizer`` its factor, and to change nothing."""
    return (isinstance(optimizer, PieceOptimizer) and optimizer.fuses) or divides_in_kernel(optimizer)


def take_back(optimizer: torch.optim.Optimizer, known: int) -> None:
    """The device has skipped the last step: what the host has advanced is as before it, when ``known`` weights had state.

    State that was made for it goes. Counts of steps on the host go back by one; torch's fused optimizers keep theirs right themselves.
    """
    weights = list(optimizer.state)  # in the order in which their states were made
    for weight in weights[known:]:
        del optimizer.state[weight]
    if isinstance(optimizer, PieceOptimizer):
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
