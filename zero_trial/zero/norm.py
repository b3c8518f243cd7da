"""The global gradient norm, in an order of summation that does not depend on where shards were cut.

Rows of ALIGN elements never cross a tensor, so every ZeRO stage and every number of ranks sees the same rows; a row's sum of squares is made in fp32
and the rows are added in float64. The total then differs between shardings by about 1e-16, which the final rounding hides: stages clip
by the same factor and their loss traces stay bit-equal. An element above 1.8e19 overflows its row and counts as non-finite.
"""

from __future__ import annotations

import torch

from zero_trial.zero.layout import ALIGN


def square_sum(shard: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``shard`` (n,), n a multiple of ALIGN, as a float64 scalar tensor; not finite if any element is not.

    Reads the shard once; makes n/ALIGN fp32 row norms.
    """
    rows = torch.linalg.vector_norm(shard.view(-1, ALIGN), dim=1, dtype=torch.float32)
    total: torch.Tensor = rows.double().square_().sum()
    return total


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most ``limit`` (0: no limit). As torch's clip_grad_norm_, 1e-6 included."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
