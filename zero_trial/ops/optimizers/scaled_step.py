"""One optimizer step with all gradients multiplied by a number, without a pass over them where the optimizer can do it.

Unscaling and clipping are one factor: (1 / loss scale) * min(1, limit / norm). Three ways, by what the optimizer is:

    ours (FusedAdam, FusedLamb ...) the factor goes into the update                          no extra bytes
    torch's fused Adam, AdamW,      the kernel divides by its ``grad_scale`` as it reads     no extra bytes (the scaled
    SGD, Adagrad                                                                             gradient is written back)
    anything else                   the gradients are multiplied in place first              8 bytes per fp32 gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zero_trial.ops.optimizers.pieces import PieceOptimizer, PieceWork

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
    elif multiplier != 0.0 and _divides_in_kernel(optimizer):
        _step_with_grad_scale(optimizer, 1.0 / multiplier)
    else:
        _multiply_gradients(optimizer, multiplier)
        optimizer.step()


def fused_step(optimizer: PieceOptimizer, work: Sequence[PieceWork], multiplier: float) -> None:
    """``optimizer.step()`` on the pieces of ``work`` alone, each in one pass that reads its gradient, multiplies it,
    and writes the weight and its rounded copy. For optimizers that have ``fuses``."""
    optimizer.work, optimizer.grad_multiplier = work, multiplier
    try:
        optimizer.step()
    finally:
        optimizer.work, optimizer.grad_multiplier = None, 1.0


def _divides_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's own classes (not subclasses, whose step may differ) with the fused kernel in every group."""
    return type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)


def _step_with_grad_scale(optimizer: Any, divisor: float) -> None:
    device = next((piece.device for group in optimizer.param_groups for piece in group["params"]), torch.device("cpu"))
    # the attribute that torch.amp.GradScaler sets on the same optimizers, for the length of one step
    optimizer.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale


def _multiply_gradients(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            gradients = [piece.grad for piece in group["params"] if piece.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, multiplier)
