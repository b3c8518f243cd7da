"""The global gradient norm, in an order of summation that does not depend on where shards were cut.

The native kernel adds squares, exact in float64, in float64. Without it rows of ALIGN elements are summed: they never cross a tensor, so every
ZeRO stage and every number of ranks sees the same rows; a row's sum of squares is made in fp32 and the rows are added in float64. Either way the
total differs between shardings by about 1e-16, which the final rounding hides: stages clip by the same factor and their loss traces stay
bit-equal. In rows, an element above 1.8e19 overflows and counts as non-finite.
"""

from __future__ import annotations

import torch

from zero_trial.ops import native_on
from zero_trial.ops.dispatch import OPS
from zero_trial.sharding.dtypes import wide_dtype
from zero_trial.sharding.layout import ALIGN


def square_sum(shard: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``shard`` (n,), n a multiple of ALIGN, as a float64 scalar tensor; not finite if any element is not.

    Reads the shard once.
    """
    if native_on(shard.device):
        exact: torch.Tensor = OPS.square_sum(shard)
        return exact
    return square_sum_of_rows(shard)


def square_sum_of_rows(shard: torch.Tensor) -> torch.Tensor:
    """The same from torch's own kernels, on any device; makes n/ALIGN fp32 row norms."""
    rows = torch.linalg.vector_norm(shard.view(-1, ALIGN), dim=1, dtype=wide_dtype(shard.dtype, torch.float32))
    total: torch.Tensor = rows.double().square_().sum()
    return total


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most ``limit`` (0: no limit). As torch's clip_grad_norm_, 1e-6 included."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def divisor(total: torch.Tensor, unscale: float, limit: float) -> torch.Tensor:
    """``1 / (unscale clip_factor)`` for a sum of squares ``total`` (1,) in float64, as an fp32 scalar beside it; where the norm is not
    finite, nothing is clipped. The host reads nothing."""
    norm = total.reshape(()).sqrt() * unscale
    factor = torch.full_like(norm, unscale)
    if limit > 0:
        clipped = (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)
        factor = factor * torch.where(torch.isfinite(norm), clipped, torch.ones_like(norm))
    return (torch.ones_like(norm) / factor).float()
