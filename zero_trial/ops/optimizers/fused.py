"""FusedAdam, CPUAdam and FusedLion: one pass over each piece and its state, by the native kernels where they can be had.

Plain ``torch.optim.Optimizer``s: they work on any parameters, whole or flat. State has torch's names and shapes (``exp_avg``, ``exp_avg_sq``,
``step``), so checkpoints of theirs and of torch's Adam and AdamW can be loaded into each other. Where no kernel takes a tensor (another
device or dtype, no compiler) it is updated by plain torch with the same formulas; ``zero_trial.ops.report()`` says which it is.

    bytes per fp32 parameter and step    Adam 28 (read p, g, m, v; write p, m, v), Lion 20
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import library
from zero_trial.ops.optimizers.pieces import PieceOptimizer

_ops = library.OPS


class FusedAdam(PieceOptimizer):
    """AdamW, or Adam with L2 regularisation where ``adam_w_mode`` is false. DeepSpeed 0.19.8's arguments and defaults."""

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        _require(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"decoupled_weight_decay": adam_w_mode})

    def update(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2), eps, decay = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
            decoupled = group["decoupled_weight_decay"]
            for piece, g, state in _with_gradients(self, group, ("exp_avg", "exp_avg_sq")):
                t = state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                rest = (lr, beta1, beta2, eps, decay, float(t), self.grad_multiplier, decoupled)
                _ops.adam_(piece, g, m, v, None, None, *rest)


class CPUAdam(FusedAdam):
    """FusedAdam under the name that scripts written for optimizer offload use; every parameter must be on the CPU."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        found = {p.device.type for p in self.param_groups[-1]["params"]} - {"cpu"}
        if found:
            raise ConfigError(
                "CPUAdam works on CPU tensors", got=", ".join(sorted(found)), expected="cpu", fix="Use FusedAdam."
            )


class FusedLion(PieceOptimizer):
    """Lion; the same arguments, defaults and state as :class:`zero_trial.ops.optimizers.lion.Lion`."""

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _require(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
            for piece, g, state in _with_gradients(self, group, ("exp_avg",)):
                _ops.lion_(piece, g, state["exp_avg"], None, None, lr, beta1, beta2, decay, self.grad_multiplier)


def _with_gradients(
    optimizer: PieceOptimizer, group: Mapping[str, Any], moments: tuple[str, ...]
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Every piece that has a gradient, with it and its state."""
    for piece in optimizer.pieces(group, moments):
        if piece.grad is not None:
            yield piece, piece.grad, optimizer.state[piece]


def _require(*, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            "the optimizer cannot use these numbers",
            where="optimizer.params",
            got=f"lr {lr}, betas {tuple(betas)}, eps {eps}, weight_decay {weight_decay}",
            expected="lr, eps, weight_decay >= 0, 0 <= beta < 1",
        )
