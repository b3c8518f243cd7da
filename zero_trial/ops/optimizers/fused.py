"""The fused optimizers: Adam, Lion, Adagrad and SGD with momentum in one pass over each shard and its state, and Lion in plain torch.

Plain ``torch.optim.Optimizer``s: they work on any parameters, whole or flat. State has torch's names and shapes (``exp_avg``, ``exp_avg_sq``,
``step``), so checkpoints of theirs and of torch's optimizers can be loaded into each other. Where no kernel takes a tensor (another
device or dtype, no compiler) it is updated by plain torch with the same formulas; ``zero_trial.ops.report()`` says which it is.

    bytes per fp32 parameter and step    Adam 28 (read p, g, m, v; write p, m, v), the others 20
    16-bit gradient in, 16-bit copy out  the same: 2 less for the gradient, 2 more for the copy; no pass of their own
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers.base import ShardOptimizer, ShardUpdate, gradients
from zero_trial.ops.spec import ADAGRAD, ADAM, LION, SGD, OptimizerOp

_ops = OPS


class FusedOptimizer(ShardOptimizer):
    """What the fused optimizers share: each piece is one call of one op, and on CUDA all pieces are one launch.

    ``op`` is a row of ops/spec.py; ``moments`` are torch's names of its states.
    """

    fuses = True
    op: OptimizerOp
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
            getattr(_ops, self.op.single)(*tensors, *numbers, *self._behind(rest))

    def _step_together(self, items: Sequence[ShardUpdate]) -> None:
        """One call per variant of the step, and for pieces with and without a copy."""
        kinds: dict[Any, list[tuple[ShardUpdate, tuple[float, ...]]]] = {}
        for item in items:
            numbers, rest = self._numbers(item)
            kinds.setdefault((rest, item.out is None), []).append((item, numbers))
        for (rest, _), those in kinds.items():
            rows = [(item.weight, item.gradient, *self._moments_of(item)) for item, _ in those]
            tensors = [list(column) for column in zip(*rows, strict=True)]
            out = [item.out for item, _ in those if item.out is not None]
            columns = [list(column) for column in zip(*(own for _, own in those), strict=True)]
            flags = self.flags()
            getattr(_ops, self.op.many)(*tensors, out, *flags, *columns, *self._behind(rest))

    def _behind(self, rest: tuple[bool, ...]) -> tuple[float, ...]:
        """What the op takes behind its numbers, in its order."""
        at = self.op.multiplier_at
        return (*rest[:at], self.grad_multiplier, *rest[at:])

    def _make_state(self, item: ShardUpdate) -> None:
        """What is missing of the piece's moments, as zeros."""
        state = self.state[item.weight]
        for name in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(item.weight, memory_format=torch.preserve_format)

    def _moments_of(self, item: ShardUpdate) -> list[Tensor]:
        return [self.state[item.weight][name] for name in self.moments]

    def _numbers(self, item: ShardUpdate) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """The piece's own numbers, and what its group shares but the multiplier, both in the order of the row. Counts the step."""
        raise NotImplementedError


def one_launch(items: Sequence[ShardUpdate]) -> bool:
    """Whether stepping the pieces together saves anything: launches do, calls on CPU are a loop either way."""
    return all(item.weight.is_cuda for item in items) and len({item.weight.device for item in items}) == 1


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with L2 regularisation where ``adam_w_mode`` is false.

    DeepSpeed 0.19.8's arguments and defaults, in torch's order. Its ``amsgrad`` and ``set_grad_none`` are taken with the one value that
    they can have; ``bias_correction`` False leaves the moments as they are.
    """

    op = ADAM
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

    def _numbers(self, item: ShardUpdate) -> tuple[tuple[float, ...], tuple[bool, ...]]:
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


class FusedLion(FusedOptimizer):
    """Lion; the same arguments, defaults and state as :class:`zero_trial.ops.optimizers.Lion`."""

    op = LION
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

    def _numbers(self, item: ShardUpdate) -> tuple[tuple[float, ...], tuple[bool, ...]]:
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


class FusedAdagrad(FusedOptimizer):
    """torch's arguments and defaults."""

    op = ADAGRAD
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

    def _make_state(self, item: ShardUpdate) -> None:
        state = self.state[item.weight]
        if "sum" not in state:
            start = self.param_groups[item.group]["initial_accumulator_value"]
            state["sum"] = torch.full_like(item.weight, start, memory_format=torch.preserve_format)

    def _numbers(self, item: ShardUpdate) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        group, state = self.param_groups[item.group], self.state[item.weight]
        t = state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        lr = float(group["lr"]) / (1 + (float(t) - 1) * group["lr_decay"])
        return (lr, group["eps"], group["weight_decay"]), ()


class FusedSGD(FusedOptimizer):
    """torch's arguments. Without momentum there is no state to fuse: ``torch.optim.SGD(fused=True)`` is one pass then."""

    op = SGD
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

    def _make_state(self, item: ShardUpdate) -> None:
        state = self.state[item.weight]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(item.weight, memory_format=torch.preserve_format)
            self._first |= {id(item.weight)}

    def _numbers(self, item: ShardUpdate) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        group, first = self.param_groups[item.group], id(item.weight) in self._first
        self._first -= {id(item.weight)}
        own = (group["momentum"], group["dampening"], group["weight_decay"], first)
        return (float(group["lr"]), *own), (group["nesterov"],)


# Lion over flat pieces: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic discovery", Algorithm 2).
#
# State: one moment per parameter (4 bytes in fp32). One temporary of the size of a group's pieces during the step.


class Lion(ShardOptimizer):
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
