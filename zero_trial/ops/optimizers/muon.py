"""Muon with AdamW beside it: hidden matrices move along their orthogonalized momentum (Jordan et
al. 2024, "Muon: An optimizer for hidden layers in neural networks"), everything else as AdamW says.

    m <- beta m + (1 - beta) g                   the momentum, 4 bytes per element in fp32
    u  = beta m + (1 - beta) g     (nesterov)    or m
    O  = NS(u)                                   singular values near 1, by Newton-Schulz iteration
    W <- (1 - lr wd) W - lr s O                     s = sqrt(max(1, rows / columns))

The iteration is that of torch.optim.Muon, in bfloat16. An optimizer group says with ``use_muon``
which rule it follows. Groups with it need whole tensors; the others are elementwise, so that flat
pieces of them may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.fused import FusedAdam
from zero_trial.ops.optimizers.shard_step import ShardUpdate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, from the same post
STEPS = 5
# DeepSpeed's defaults of each kind of group.
MUON_DEFAULTS: Mapping[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
ADAM_DEFAULTS: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_NORM_EPS = 1e-7


class Muon(FusedAdam):
    """Every group must say ``use_muon`` (of bare tensors, those of two or more dimensions do), and
    what it does not say has DeepSpeed's default of its kind (:data:`MUON_DEFAULTS`,
    :data:`ADAM_DEFAULTS`).

    Args:
        nesterov, ns_steps, ns_coefficients: of groups with ``use_muon``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        nesterov: bool = True,
        ns_steps: int = STEPS,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ) -> None:
        own = {"nesterov": nesterov, "ns_steps": ns_steps, "ns_coefficients": tuple(ns_coefficients)}
        kinds = {True: {**MUON_DEFAULTS, **own}, False: {**ADAM_DEFAULTS, "momentum": 0.0}}
        given = list(params)
        if given and isinstance(given[0], Tensor):
            whole = [param for param in given if param.dim() >= 2], [param for param in given if param.dim() < 2]
            given = [{"params": own, "use_muon": own is whole[0]} for own in whole if own]
        groups = [{**kinds[bool(group["use_muon"])], **group} for group in given]
        for group in groups:
            momentum, steps = group["momentum"], group.get("ns_steps", STEPS)
            if not 0 <= momentum < 1 or not 1 <= steps < 100 or group["lr"] < 0 or group["weight_decay"] < 0:
                raise ConfigError(
                    "Muon cannot use these numbers",
                    where="optimizer.params",
                    got=f"lr {group['lr']}, momentum {momentum}, weight_decay {group['weight_decay']}, ns_steps {steps}",
                    expected="lr, weight_decay >= 0, 0 <= momentum < 1, 1 <= ns_steps < 100",
                )
        super().__init__(groups, lr=0.0, betas=ADAM_DEFAULTS["betas"], eps=ADAM_DEFAULTS["eps"])

    def update(self, updates: Sequence[ShardUpdate], multiplier: float) -> None:
        flat = [update for update in updates if not self.param_groups[update.group]["use_muon"]]
        if flat:
            super().update(flat, multiplier)
        for update in updates:
            if self.param_groups[update.group]["use_muon"]:
                self._update_matrix(update, multiplier)

    def _update_matrix(self, update: ShardUpdate, multiplier: float) -> None:
        """Update one tensor. Holds a gradient in fp32, the iterates in bfloat16 and a rows x rows
        matrix, or columns x columns, during the call."""
        weight, group = update.weight, self.param_groups[update.group]
        (momentum,) = self.moments_of(weight, ("momentum_buffer",))
        gradient = update.gradient.to(weight.dtype).view(weight.shape)
        if multiplier != 1.0:
            gradient = gradient * multiplier
        beta, lr, decay = group["momentum"], float(group["lr"]), group["weight_decay"]
        momentum.lerp_(gradient, 1 - beta)
        direction = gradient.lerp(momentum, beta) if group["nesterov"] else momentum
        # filters of a convolution are rows; of more dimensions, the last two are stacked matrices
        flat = (
            direction.flatten(1)
            if direction.dim() == 4
            else direction.flatten(0, -3)
            if direction.dim() > 4
            else direction
        )
        ortho = orthogonalized(flat, group["ns_steps"], group["ns_coefficients"]).reshape(weight.shape)
        scale = math.sqrt(max(1.0, weight.shape[-2] / weight.shape[-1]))
        weight.mul_(1 - lr * decay).add_(ortho, alpha=-lr * scale)
        if update.out is not None:
            update.out.view(weight.shape).copy_(weight)


def orthogonalized(
    matrix: Tensor, steps: int = STEPS, coefficients: tuple[float, float, float] = COEFFICIENTS
) -> Tensor:
    """Return ``matrix`` (rows, columns), or a stack of them, with its singular values moved to
    about 0.7 to 1.2, in bfloat16.

    Each step is X <- a X + (b A + c A^2) X with A = X X^T, on the side where A is smaller.
    """
    a, b, c = coefficients
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=_NORM_EPS)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalization_flops(shape: Sequence[int]) -> float:
    """Return the floating-point operations of :func:`orthogonalized` for a tensor of ``shape``: per
    step 4 m^2 n + 2 m^3 of a matrix m x n, m the smaller side. A tensor that is no matrix counts
    its elements."""
    if len(shape) < 2:
        return float(math.prod(shape))
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape[-2:]
    m, n = sorted((rows, columns))
    stack = 1 if len(shape) == 4 else math.prod(shape[:-2])
    return float(stack * STEPS * (4 * m * m * n + 2 * m**3))
