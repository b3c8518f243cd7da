"""Lion over flat pieces: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic discovery", Algorithm 2).

State: one moment per parameter (4 bytes in fp32). One temporary of the size of a group's pieces during the step.
"""

from __future__ import annotations

import torch

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.pieces import PieceOptimizer, gradients


class Lion(PieceOptimizer):
    """``lr``, ``betas`` = (interpolation, momentum) and ``weight_decay`` (decoupled) with DeepSpeed 0.19.8's
    defaults."""

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                "Lion cannot use these numbers",
                where="optimizer.params",
                got=f"lr {lr}, betas {tuple(betas)}, weight_decay {weight_decay}",
                expected="lr >= 0, 0 <= beta < 1, weight_decay >= 0",
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self) -> None:
        k = self.grad_multiplier
        for group in self.param_groups:
            p = self.pieces(group, ("exp_avg",))
            if not p:
                continue
            g, m = gradients(p), self.moment(p, "exp_avg")
            lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
            c = torch._foreach_mul(m, beta1)
            torch._foreach_add_(c, g, alpha=(1 - beta1) * k)  # c = beta1 m + (1 - beta1) g
            torch._foreach_sign_(c)
            if weight_decay:
                torch._foreach_mul_(p, 1 - lr * weight_decay)
            torch._foreach_add_(p, c, alpha=-lr)  # p -= lr (sign(c) + weight_decay p)
            torch._foreach_mul_(m, beta2)
            torch._foreach_add_(m, g, alpha=(1 - beta2) * k)  # m = beta2 m + (1 - beta2) g
