"""FusedAdam, CPUAdam and FusedLion: one pass over each piece and its state, by the native kernels where they can be had.

Plain ``torch.optim.Optimizer``s: they work on any parameters, whole or flat. State has torch's names and shapes (``exp_avg``, ``exp_avg_sq``,
``step``), so checkpoints of theirs and of torch's Adam and AdamW can be loaded into each other. Where no kernel takes a tensor (another
device or dtype, no compiler) it is updated by plain torch with the same formulas; ``zero_trial.ops.report()`` says which it is.

    bytes per fp32 parameter and step    Adam 28 (read p, g, m, v; write p, m, v), Lion 20
    16-bit gradient in, 16-bit copy out  the same: 2 less for the gradient, 2 more for the copy; no pass of their own
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import library
from zero_trial.ops.optimizers.pieces import PieceOptimizer, PieceWork

_ops = library.OPS


class OnePass(PieceOptimizer):
    """What the fused optimizers share: each piece is one call of one op, and on CUDA all pieces are one launch."""

    fuses = True
    op = ""
    moments: tuple[str, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of groups that torch's own optimizer wrote; a variant of the formula that it had is refused rather than forgotten."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            for key in ("amsgrad", "maximize"):
                if group.get(key):
                    raise ConfigError(
                        f"{type(self).__name__} cannot go on with state of this kind", got=f"{key} {group[key]}"
                    )

    def update(self) -> None:
        items = list(self.waiting())
        for item in items:
            self._make_state(item)
        if items and (self.gate is not None or (len(items) > 1 and one_launch(items))):
            self._step_together(items)
            return
        for item in items:
            tensors = (item.weight, item.gradient, *self._moments_of(item), item.out, None)
            numbers, rest = self._numbers(item)
            getattr(_ops, self.op)(*tensors, *numbers, *self._behind(rest))

    def _step_together(self, items: Sequence[PieceWork]) -> None:
        """One call per variant of the step, and for pieces with and without a copy."""
        kinds: dict[Any, list[tuple[PieceWork, tuple[float, ...]]]] = {}
        for item in items:
            numbers, rest = self._numbers(item)
            kinds.setdefault((rest, item.out is None), []).append((item, numbers))
        for (rest, _), those in kinds.items():
            rows = [(item.weight, item.gradient, *self._moments_of(item)) for item, _ in those]
            tensors = [list(column) for column in zip(*rows, strict=True)]
            out = [item.out for item, _ in those if item.out is not None]
            columns = [list(column) for column in zip(*(own for _, own in those), strict=True)]
            flags = self.flags()
            getattr(_ops, f"{self.op[:-1]}_many_")(*tensors, out, *flags, *columns, *self._behind(rest))

    def _behind(self, rest: tuple[bool, ...]) -> tuple[float, ...]:
        """What the op takes behind its numbers, in its order."""
        return (self.grad_multiplier, *rest)

    def _make_state(self, item: PieceWork) -> None:
        """What is missing of the piece's moments, as zeros."""
        state = self.state[item.weight]
        for name in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(item.weight, memory_format=torch.preserve_format)

    def _moments_of(self, item: PieceWork) -> list[Tensor]:
        return [self.state[item.weight][name] for name in self.moments]

    def _numbers(self, item: PieceWork) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """What the op takes before the multiplier, and behind it. Counts the step."""
        raise NotImplementedError


def one_launch(items: Sequence[PieceWork]) -> bool:
    """Whether stepping the pieces together saves anything: launches do, calls on CPU are a loop either way."""
    return all(item.weight.is_cuda for item in items) and len({item.weight.device for item in items}) == 1


class FusedAdam(OnePass):
    """AdamW, or Adam with L2 regularisation where ``adam_w_mode`` is false.

    DeepSpeed 0.19.8's arguments and defaults, in torch's order. Its ``amsgrad`` and ``set_grad_none`` are taken with the one value that
    they can have; ``bias_correction`` False leaves the moments as they are.
    """

    op = "adam_"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        *,
        bias_correction: bool = True,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _require(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if amsgrad:
            raise _no_variant("amsgrad", "FusedAdam has no AMSGrad form", "Use torch.optim.AdamW(amsgrad=True).")
        _grads_are_dropped(set_grad_none)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"decoupled_weight_decay": adam_w_mode, "bias_correction": bias_correction}
        super().__init__(params, defaults)

    def _numbers(self, item: PieceWork) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        group, state = self.param_groups[item.group], self.state[item.weight]
        t = state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        at = float(t) if group["bias_correction"] else math.inf  # an infinitely late step has no bias
        numbers = (float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], at)
        return numbers, (group["decoupled_weight_decay"],)


class CPUAdam(FusedAdam):
    """FusedAdam under the name that scripts written for optimizer offload use; every parameter must be on the CPU."""

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        *,
        bias_correction: bool = True,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise _no_variant("fp32_optimizer_states", "the moments have the parameters' dtype", "Leave it out.")
        super().__init__(
            params, lr, betas, eps, weight_decay, adamw_mode, bias_correction=bias_correction, amsgrad=amsgrad
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        found = {p.device.type for p in self.param_groups[-1]["params"]} - {"cpu"}
        if found:
            raise ConfigError(
                "CPUAdam works on CPU tensors", got=", ".join(sorted(found)), expected="cpu", fix="Use FusedAdam."
            )


class FusedLion(OnePass):
    """Lion; the same arguments, defaults and state as :class:`zero_trial.ops.optimizers.lion.Lion`."""

    op = "lion_"
    moments = ("exp_avg",)

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        set_grad_none: bool = True,
    ) -> None:
        _require(lr=lr, betas=betas, weight_decay=weight_decay)
        _grads_are_dropped(set_grad_none)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _numbers(self, item: PieceWork) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        group = self.param_groups[item.group]
        return (float(group["lr"]), *group["betas"], group["weight_decay"]), ()


def _grads_are_dropped(set_grad_none: bool) -> None:
    if not set_grad_none:
        raise _no_variant("set_grad_none", "it says how zero_grad() works", "Call zero_grad(set_to_none=False).")


def _no_variant(key: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(reason, where=f"optimizer.params.{key}", fix=fix)


def _require(*, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            "the optimizer cannot use these numbers",
            where="optimizer.params",
            got=f"lr {lr}, betas {tuple(betas)}, eps {eps}, weight_decay {weight_decay}",
            expected="lr, eps, weight_decay >= 0, 0 <= beta < 1",
        )
