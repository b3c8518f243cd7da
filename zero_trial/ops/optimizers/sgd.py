"""FusedSGD: SGD with momentum, one pass over each piece and its buffer by the native kernels where they can be had.

State and numbers of torch.optim.SGD, so either's checkpoint can be loaded by the other. 20 bytes per fp32 parameter and step.
"""

from __future__ import annotations

import torch

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.fused import OnePass
from zero_trial.ops.optimizers.pieces import PieceWork


class FusedSGD(OnePass):
    """torch's arguments. Without momentum there is no state to fuse: ``torch.optim.SGD(fused=True)`` is one pass then."""

    op = "sgd_"
    moments = ("momentum_buffer",)
    _first: frozenset[int] = frozenset()  # ids of weights whose buffer becomes the gradient in this step

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or momentum <= 0 or (nesterov and dampening != 0):
            raise ConfigError(
                "FusedSGD cannot use these numbers",
                where="optimizer.params",
                got=f"lr {lr}, momentum {momentum}, dampening {dampening}, weight_decay {weight_decay}, nesterov {nesterov}",
                expected="lr, weight_decay >= 0, momentum > 0; nesterov without dampening",
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov})

    def _make_state(self, item: PieceWork) -> None:
        state = self.state[item.weight]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(item.weight, memory_format=torch.preserve_format)
            self._first |= {id(item.weight)}

    def _numbers(self, item: PieceWork) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        group, first = self.param_groups[item.group], id(item.weight) in self._first
        self._first -= {id(item.weight)}
        own = (group["momentum"], group["dampening"], group["weight_decay"], first)
        return (float(group["lr"]), *own), (group["nesterov"],)

    def _behind(self, rest: tuple[bool, ...]) -> tuple[float, ...]:
        return (*rest, self.grad_multiplier)
