"""Optimizer arithmetic, written out once in the symbols of the papers: the reference for every
faster version.

Each function takes the tensors before a step and returns them after it; nothing is changed in
place. Any floating dtype works and is kept: with float64 inputs the result is the oracle for fp32
kernels. ``t`` counts steps from 1.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor


class AdamResult(NamedTuple):
    """Parameters, first and second moment after the step."""

    p: Tensor
    m: Tensor
    v: Tensor


def _adam_moments(g: Tensor, m: Tensor, v: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g  # Kingma & Ba 2015, Algorithm 1: biased first moment
    v = beta2 * v + (1 - beta2) * g * g  # biased second raw moment
    return m, v


def adam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: float,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> AdamResult:
    """Adam with L2 regularization: the decay is part of the gradient. ``decoupled``: AdamW
    (Loshchilov & Hutter 2019, Algorithm 2, line 12, with the decay scaled by lr as in torch)."""
    m, v = _adam_moments(g if decoupled else g + weight_decay * p, m, v, betas)
    m_hat = m / (1 - betas[0] ** t)  # Kingma & Ba 2015, Algorithm 1: bias-corrected moments
    root = (v / (1 - betas[1] ** t)).sqrt() + eps
    moved = lr * (m_hat / root + weight_decay * p) if decoupled else lr * m_hat / root
    return AdamResult(p - moved, m, v)


adamw = partial(adam, decoupled=True)


class LionResult(NamedTuple):
    """Parameters and momentum after the step."""

    p: Tensor
    m: Tensor


def lion(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> LionResult:
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2."""
    beta1, beta2 = betas
    c = beta1 * m + (1 - beta1) * g
    p = p - lr * (c.sign() + weight_decay * p)
    return LionResult(p, beta2 * m + (1 - beta2) * g)


def adagrad(
    p: Tensor,
    g: Tensor,
    s: Tensor,
    t: int = 1,
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Duchi, Hazan & Singer 2011, figure 1: p -= lr g / sqrt(sum of g^2), torch's ``lr_decay``."""
    g = g + weight_decay * p
    s = s + g * g
    return p - lr / (1 + (t - 1) * lr_decay) * g / (s.sqrt() + eps), s


def sgd(
    p: Tensor,
    g: Tensor,
    b: Tensor | None = None,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Sutskever et al. 2013, equations 1 to 4, as torch: the buffer starts as a gradient."""
    g = g + weight_decay * p
    if momentum == 0.0:
        return p - lr * g, None
    b = g if b is None else momentum * b + (1 - dampening) * g
    return p - lr * (g + momentum * b if nesterov else b), b
