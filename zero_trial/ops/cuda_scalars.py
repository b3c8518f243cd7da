"""What one optimizer step does to each element, as the struct of csrc/include that its kernel reads: computed in double, rounded once.

The same numbers as csrc/cpu/dispatch.cpp makes, so that CPU and CUDA differ in no bit.
"""

from __future__ import annotations

import math
import struct


def adam(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, step: float, multiplier: float, decoupled: bool
) -> bytes:
    """ZtAdam."""
    return struct.pack(
        "8f",
        *(multiplier, 1 - beta1, 1 - beta2, lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), eps),
        *((0.0, lr * decay) if decoupled else (decay, 0.0)),
    )


def lion(lr: float, beta1: float, beta2: float, decay: float, multiplier: float) -> bytes:
    """ZtLion."""
    return struct.pack("5f", multiplier, 1 - beta1, 1 - beta2, lr, lr * decay)


def adagrad(lr: float, eps: float, decay: float, multiplier: float) -> bytes:
    """ZtAdagrad; ``lr`` with its decay already in it."""
    return struct.pack("4f", multiplier, lr, eps, decay)


def sgd(
    lr: float, momentum: float, dampening: float, decay: float, first: bool, nesterov: bool, multiplier: float
) -> bytes:
    """ZtSgd."""
    old, share = (0.0, 1.0) if first else (momentum, 1 - dampening)
    return struct.pack("7f", multiplier, lr, decay, old, share, momentum, 0.0 if nesterov else 1.0)


def lamb(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, step: float, multiplier: float, corrected: bool
) -> bytes:
    """ZtLamb; ``corrected``: the moments' bias is."""
    inverses = (1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)) if corrected else (1.0, 1.0)
    return struct.pack("8f", multiplier, 1 - beta1, 1 - beta2, *inverses, eps, decay, lr)


def control(unscale: float, clip: float) -> bytes:
    """ZtControl."""
    return struct.pack("2d", unscale, clip)
