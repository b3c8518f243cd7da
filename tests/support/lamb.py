"""LAMB on one whole tensor, in plain torch: what the optimizer over pieces is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_trial.ops.reference import AdamResult, _adam_moments


def lamb_step(
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
    bias_correction: bool = True,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
) -> AdamResult:
    """You et al. 2020, Algorithm 2, on one whole tensor; phi is the identity and the ratio is
    clamped as in DeepSpeed."""
    m, v = _adam_moments(g, m, v, betas)
    c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1.0, 1.0)
    r = (m / c1) / ((v / c2).sqrt() + eps)
    update = r + weight_decay * p
    w_norm, u_norm = p.norm(), update.norm()
    ratio = torch.where(
        (w_norm > 0) & (u_norm > 0), (w_norm / u_norm).clamp(min_coeff, max_coeff), torch.ones_like(w_norm)
    )
    return AdamResult(p - lr * ratio * update, m, v)
