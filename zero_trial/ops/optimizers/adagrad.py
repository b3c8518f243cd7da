"""FusedAdagrad: Adagrad, one pass over each piece and its sum by the native kernels where they can be had.

State and numbers of torch.optim.Adagrad, so either's checkpoint can be loaded by the other. 20 bytes per fp32 parameter and step.
"""

from __future__ import annotations

import torch

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.fused import OnePass
from zero_trial.ops.optimizers.pieces import PieceWork


class FusedAdagrad(OnePass):
    """torch's arguments and defaults."""

    op = "adagrad_"
    moments = ("sum",)

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        if min(lr, lr_decay, weight_decay, initial_accumulator_value, eps) < 0:
            raise ConfigError(
                "FusedAdagrad cannot use these numbers",
                where="optimizer.params",
                got=f"lr {lr}, lr_decay {lr_decay}, weight_decay {weight_decay}, eps {eps}, "
                f"initial_accumulator_value {initial_accumulator_value}",
                expected="none below 0",
            )
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults | {"initial_accumulator_value": initial_accumulator_value})

    def _make_state(self, item: PieceWork) -> None:
        state = self.state[item.weight]
        if "sum" not in state:
            start = self.param_groups[item.group]["initial_accumulator_value"]
            state["sum"] = torch.full_like(item.weight, start, memory_format=torch.preserve_format)

    def _numbers(self, item: PieceWork) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        group, state = self.param_groups[item.group], self.state[item.weight]
        t = state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        lr = float(group["lr"]) / (1 + (float(t) - 1) * group["lr_decay"])
        return (lr, group["eps"], group["weight_decay"]), ()
