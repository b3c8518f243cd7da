"""Our elementwise optimizers, each a step in one pass over flat pieces.

FusedAdam, FusedLion, FusedAdagrad and FusedSGD are plain ``torch.optim.Optimizer``s: they work on
any parameters, whole or flat. State has torch's names and shapes (``exp_avg``, ``exp_avg_sq``,
``step``), so checkpoints are interchangeable with those of torch's optimizers. If no kernel
supports a tensor (another device or dtype, no compiler), plain torch updates it with the same
formulas; ``zero_trial.ops.report()`` reports which is used.

    bytes per fp32 parameter and step    Adam 28 (read p, g, m, v; write p, m, v), the others 20
    16-bit gradient in, 16-bit copy out  the same: 2 less for the gradient, 2 more for the copy; no
                                         pass of their own
    states in bf16                       4 less per state: Adam 20
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers.shard_step import ShardOptimizer, ShardUpdate, TensorPart, require_numbers
from zero_trial.ops.plain import key_of, require_format
from zero_trial.ops.spec import ADAGRAD, ADAM, LION, SGD, OptimizerOp


class FusedOptimizer(ShardOptimizer):
    """An elementwise optimizer: all pieces of a variant of the formula are one call of one op, and
    on CUDA one launch.

    ``op`` is a row of ops/spec.py; ``moments`` are torch's names of its states; ``counts``: count
    steps even if states are in fp32.

    Args:
        states: how the moments are stored: ``fp32`` (in the weight's dtype) or ``bf16``
            (:mod:`zero_trial.ops.plain`; weights are fp32 then, and every optimizer counts steps).
    """

    fuses = True
    op: OptimizerOp
    moments: tuple[str, ...] = ()
    counts = False

    def __init__(self, params: torch.optim.optimizer.ParamsT, defaults: dict[str, Any], states: str = "fp32") -> None:
        self.states = require_format(states, f"{type(self).__name__}(states)")
        self._parts: Mapping[int, Sequence[TensorPart]] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has other parameters: :meth:`bind` it again."""
        return {**super().__getstate__(), "states": self.states, "_parts": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the moments as they are stored here."""
        super().load_state_dict(state_dict)  # torch has cast all to the dtype of the weights
        if self.states == "fp32":
            return
        for group in self.param_groups:
            for state in (self.state.get(weight, {}) for weight in group["params"]):
                for kind in (kind for kind in self.moments if state.get(kind) is not None):
                    state[kind] = state[kind].to(torch.bfloat16)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        found = {p.dtype for p in self.param_groups[-1]["params"]} - {torch.float32}
        if found and self.states != "fp32":
            raise ConfigError(
                f"{type(self).__name__} stores moments in {self.states} for fp32 weights only",
                got=", ".join(map(str, found)),
                expected="torch.float32",
            )

    def bind(self, parts: Mapping[int, Sequence[TensorPart]]) -> None:
        """Set which elements of each piece belong to which tensor: id(piece) -> its parts of
        tensors, in order; padding between them.

        Without it each parameter is one tensor, and its number in the groups is its seed.
        """
        self._parts = {key: list(value) for key, value in parts.items()}

    def new_moment(self, weight: Tensor, kind: str) -> Tensor:
        """Return zeros for a moment of a piece, as it is stored."""
        dtype = torch.bfloat16 if self.states == "bf16" and kind in self.moments else None
        return torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accept state, including that of torch's own optimizer. Raises ConfigError for a variant
        of the formula that this class does not have."""
        super().__setstate__({"states": "fp32", "_parts": {}, **self.__dict__, **state})
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            for key in ("amsgrad", "maximize"):
                if group.get(key):
                    raise ConfigError(
                        f"{type(self).__name__} cannot load state of this kind", got=f"{key} {group[key]}"
                    )

    def update(self, updates: Sequence[ShardUpdate], multiplier: float) -> None:
        op, at = self.op, self.op.multiplier_at
        lists: dict[Any, list[list[Any]]] = {}  # a call's columns, by shared properties
        for update in updates:
            weight, state, group = update.weight, self.state[update.weight], self.param_groups[update.group]
            first, tensors = state.get(self.moments[0]) is None, [weight, update.gradient]
            for name in self.moments:
                if state.get(name) is None:  # torch's SGD saves None for a buffer that it has not made
                    start = group.get("initial_accumulator_value", 0.0)
                    state[name] = self.new_moment(weight, name).fill_(start)
                tensors.append(state[name])
            step = 1.0
            if self.counts or self.states != "fp32":
                state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
                step = float(state["step"])
            own, shared = self._numbers(group, step, first)
            kind = (shared, update.out is None, weight.device)
            if kind not in lists:
                lists[kind] = [[] for _ in range(len(tensors) + 3 + len(own))]
            rows = (
                [(*tensors, update.out, None, None)] if self.states == "fp32" else self._parts_of(tensors, update, step)
            )
            for row in rows:
                for column, value in zip(lists[kind], (*row, *own), strict=True):
                    if value is not None:
                        column.append(value)
        for (shared, _, _), columns in lists.items():
            getattr(OPS, f"{op.name}_")(*columns, *shared[:at], multiplier, *shared[at:])

    def _parts_of(self, tensors: Sequence[Tensor], update: ShardUpdate, step: float) -> list[tuple[Any, ...]]:
        """Cut a piece with states in bf16 into its tensors' parts: the noise of each begins with
        its tensor. Return their tensors, copy, key, and place."""
        weight, rows = update.weight, []
        flat = [None if x is None else x.detach().view(-1) for x in (*tensors, update.out)]
        numbers = (id(p) for group in self.param_groups for p in group["params"])
        seed = next((number for number, key in enumerate(numbers) if key == id(weight)), 0)
        for part in self._parts.get(id(weight)) or [TensorPart(seed, 0, 0, weight.numel())]:
            cut = [None if x is None else x[part.start : part.stop] for x in flat]
            rows.append((*cut, key_of(part.tensor, step), part.first))
        return rows

    def _numbers(self, group: Mapping[str, Any], step: float, first: bool) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return a piece's own numbers, and the numbers that its group shares (except the
        multiplier), in the order of the row.

        Args:
            first: the piece had no moments before this step.
        """
        raise NotImplementedError


def _grads_are_dropped(set_grad_none: bool) -> None:
    if not set_grad_none:
        raise _no_variant(
            "set_grad_none", "set_grad_none is an option of zero_grad()", "Call zero_grad(set_to_none=False)."
        )


def _no_variant(key: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(reason, where=f"optimizer.params.{key}", fix=fix)


def _require(*, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    fits = lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)
    expected = "lr, eps, weight_decay >= 0, 0 <= beta < 1"
    require_numbers("the optimizer", fits, expected, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with L2 regularization if ``adam_w_mode`` is false.

    DeepSpeed 0.19.8's arguments and defaults, in torch's order. Its ``amsgrad`` and
    ``set_grad_none`` are accepted with their only possible value; ``bias_correction`` False
    leaves the moments as they are.
    """

    op = ADAM
    moments = ("exp_avg", "exp_avg_sq")
    counts = True

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
        states: str = "fp32",
    ) -> None:
        _require(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if amsgrad:
            raise _no_variant("amsgrad", "FusedAdam has no AMSGrad variant", "Use torch.optim.AdamW(amsgrad=True).")
        _grads_are_dropped(set_grad_none)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"decoupled_weight_decay": adam_w_mode, "bias_correction": bias_correction}
        self.adam_w_mode = adam_w_mode
        super().__init__(params, defaults, states)

    def _numbers(self, group: Mapping[str, Any], step: float, first: bool) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        at = step if group["bias_correction"] else math.inf  # an infinitely late step has no bias
        numbers = (float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], at)
        return numbers, (group["decoupled_weight_decay"],)


class CPUAdam(FusedAdam):
    """FusedAdam under DeepSpeed's name for optimizer offload; parameters must be on the CPU."""

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
        own = {"bias_correction": bias_correction, "amsgrad": amsgrad}
        states = "fp32" if fp32_optimizer_states else "bf16"
        super().__init__(params, lr, betas, eps, weight_decay, adamw_mode, **own, states=states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        found = {p.device.type for p in self.param_groups[-1]["params"]} - {"cpu"}
        if found:
            raise ConfigError(
                "CPUAdam only works on CPU tensors", got=", ".join(sorted(found)), expected="cpu", fix="Use FusedAdam."
            )


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2): one moment per parameter, DeepSpeed's defaults."""

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
        states: str = "fp32",
    ) -> None:
        _require(lr=lr, betas=betas, weight_decay=weight_decay)
        _grads_are_dropped(set_grad_none)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, states)

    def _numbers(self, group: Mapping[str, Any], step: float, first: bool) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        return (float(group["lr"]), *group["betas"], group["weight_decay"]), ()


class FusedAdagrad(FusedOptimizer):
    """torch's arguments and defaults."""

    op = ADAGRAD
    moments = ("sum",)
    counts = True

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        states: str = "fp32",
    ) -> None:
        numbers = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        numbers["initial_accumulator_value"] = initial_accumulator_value
        require_numbers("FusedAdagrad", min(numbers.values()) >= 0, "none below 0", **numbers)
        super().__init__(params, numbers, states)

    def _numbers(self, group: Mapping[str, Any], step: float, first: bool) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return (lr, group["eps"], group["weight_decay"]), ()


class FusedSGD(FusedOptimizer):
    """torch's arguments. Without momentum there is no state to fuse:
    ``torch.optim.SGD(fused=True)`` is one pass then."""

    op = SGD
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        states: str = "fp32",
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults["weight_decay"] = weight_decay
        fits = lr >= 0 and weight_decay >= 0 and momentum > 0 and not (nesterov and dampening != 0)
        expected = "lr, weight_decay >= 0, momentum > 0; nesterov without dampening"
        require_numbers("FusedSGD", fits, expected, **defaults, nesterov=nesterov)
        super().__init__(params, defaults | {"nesterov": nesterov}, states)

    def _numbers(self, group: Mapping[str, Any], step: float, first: bool) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        own = (group["momentum"], group["dampening"], group["weight_decay"], first)
        return (float(group["lr"]), *own), (group["nesterov"],)


# --- Muon -----------------------------------------------------------------------------------------
#
# Hidden matrices move along their orthogonalized momentum (Jordan et al. 2024, "Muon: An optimizer
# for hidden layers in neural networks"), everything else by AdamW.
#
#     m <- beta m + (1 - beta) g                   the momentum, 4 bytes per element in fp32
#     u  = beta m + (1 - beta) g     (nesterov)    or m
#     O  = NS(u)                                   singular values near 1, by Newton-Schulz steps
#     W <- (1 - lr wd) W - lr s O                  s = sqrt(max(1, rows / columns))
#
# The iteration is that of torch.optim.Muon, in bfloat16. An optimizer group's ``use_muon`` selects
# its rule. Groups with it need whole tensors; the others are elementwise, so that flat
# pieces of them may be cut anywhere.


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, from the same post
STEPS = 5
# DeepSpeed's defaults of each kind of group.
MUON_DEFAULTS: Mapping[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
ADAM_DEFAULTS: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_NORM_EPS = 1e-7


class Muon(FusedAdam):
    """Every group must set ``use_muon`` (bare tensors: true if of two or more dimensions). Settings
    that it omits have DeepSpeed's defaults for its kind (:data:`MUON_DEFAULTS`,
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
            numbers: dict[str, Any] = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
            numbers["ns_steps"] = steps = group.get("ns_steps", STEPS)
            fits = 0 <= numbers["momentum"] < 1 and 1 <= steps < 100
            fits = fits and min(numbers["lr"], numbers["weight_decay"]) >= 0
            expected = "lr, weight_decay >= 0, 0 <= momentum < 1, 1 <= ns_steps < 100"
            require_numbers("Muon", fits, expected, **numbers)
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
    step 4 m^2 n + 2 m^3 of a matrix m x n, m the smaller side. For a tensor that is not a matrix:
    its elements."""
    if len(shape) < 2:
        return float(math.prod(shape))
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape[-2:]
    m, n = sorted((rows, columns))
    stack = 1 if len(shape) == 4 else math.prod(shape[:-2])
    return float(stack * STEPS * (4 * m * m * n + 2 * m**3))
