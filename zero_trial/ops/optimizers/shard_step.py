"""One step with a gradient multiplier, over this rank's pieces, for any optimizer.

Unscaling and clipping multiply all gradients by one factor, (1 / loss scale) * min(1, limit /
norm). The cost depends on the optimizer:

    ours (FusedAdam, FusedLamb ...)   no extra bytes: the factor goes into the update
    torch's fused Adam, AdamW, SGD,   no extra bytes: the kernel divides by its ``grad_scale`` as it
    Adagrad                           reads, and writes the scaled gradient back
    anything else                     8 bytes per fp32 gradient, multiplied in place first
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero_trial.errors import ConfigError, TrialError

_STEP_HOOKS = tuple(f"_optimizer_step_{kind}_hooks" for kind in ("pre", "post"))
_STATE_HOOKS = tuple(
    f"_optimizer_{of}_{kind}_hooks" for of in ("state_dict", "load_state_dict") for kind in ("pre", "post")
)


# settings of torch's optimizers that change the algorithm
_VARIANTS = ("amsgrad", "maximize")


class ShardUpdate(NamedTuple):
    """Tensors that one pass over a piece reads and writes; ``gradient`` and ``out`` have as many
    elements as ``weight``, and any floating dtype."""

    weight: Tensor
    gradient: Tensor
    out: Tensor | None  # receives the new weight, rounded to its own dtype
    group: int  # index into param_groups


class TensorPart(NamedTuple):
    """Elements [start, stop) of a piece: those of tensor number ``tensor`` from ``first`` on."""

    tensor: int
    first: int
    start: int
    stop: int


class ShardOptimizer(torch.optim.Optimizer):
    """Base of our optimizers. ``fuses``: one pass handles 16-bit gradients and rounded weights."""

    elementwise: bool = True
    fuses: bool = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, without torch's wrapper. The wrapper imports torch.compile,
        which takes a second on every rank, to exclude a function that no compiled graph calls."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        updates: Sequence[ShardUpdate] | None = None,
        multiplier: float = 1.0,
    ) -> Any:
        """Update pieces in place; return what ``closure`` returns.

        Args:
            updates: the pieces with their gradients; without it, every piece that has a ``.grad``.
            multiplier: of the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for key in _VARIANTS:
                if group.get(key) and key not in self.defaults:
                    # user code requests another algorithm, which torch's class of that name has
                    raise ConfigError(
                        f"{type(self).__name__} does not support {key}",
                        where=f"optimizer.param_groups[{index}]",
                        got=f"{key}={group[key]}",
                        fix=f'Set it in ds_config ("params": {{"{key}": ...}}), which then uses torch\'s own class, or remove it.',
                    )
        given = self._with_gradients() if updates is None else updates
        self.update(given, multiplier)
        # Autograd does not see the ops' writes: this makes a graph that still needs an old weight
        # fail, as with torch's own steps.
        for update in given:
            for written in (update.weight, update.out):
                if written is not None and not written.is_inference():
                    increment_version(written)
        return loss

    def update(self, updates: Sequence[ShardUpdate], multiplier: float) -> None:
        """Do the arithmetic of :meth:`step`."""
        raise NotImplementedError

    def _with_gradients(self) -> list[ShardUpdate]:
        found = []
        for index, group in enumerate(self.param_groups):
            for piece in group["params"]:
                if piece.grad is not None:
                    if piece.grad.layout is not torch.strided:
                        raise ConfigError(
                            f"{type(self).__name__} does not support sparse gradients",
                            got=f"{piece.grad.layout} for a parameter of shape {tuple(piece.shape)}",
                            fix="Build the embedding with sparse=False, or use torch.optim.SparseAdam for it.",
                        )
                    found.append(ShardUpdate(piece, piece.grad, None, index))
        return found

    def moments_of(self, weight: Tensor, names: Sequence[str], start: float = 0.0) -> list[Tensor]:
        """Return the named moments of a piece; missing ones are created, filled with ``start``."""
        state = self.state[weight]
        for name in names:
            if state.get(name) is None:  # torch's SGD saves None for a buffer that it has not made
                state[name] = torch.full_like(weight, start, memory_format=torch.preserve_format)
        return [state[name] for name in names]

    def count_step(self, weight: Tensor) -> float:
        """Count one more step of a piece; return the number."""
        state = self.state[weight]
        state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        return float(state["step"])


def require_numbers(name: str, fits: bool, expected: str, **numbers: Any) -> None:
    """Raise ConfigError for numbers that an optimizer cannot use, unless they fit."""
    if not fits:
        got = ", ".join(f"{key} {value}" for key, value in numbers.items())
        what = f"{name} does not accept these values"
        raise ConfigError(what, where="optimizer.params", got=got, expected=expected)


def scaled_step(optimizer: torch.optim.Optimizer, multiplier: float = 1.0) -> None:
    """Step on ``multiplier`` times the gradients, whose own values are undefined afterwards.

    A multiplier of exactly 1 is a plain step, so an unclipped fp32 run has the bits of torch's own
    optimizer.
    """
    if multiplier == 1.0:
        optimizer.step()
    elif isinstance(optimizer, ShardOptimizer):
        optimizer.step(multiplier=multiplier)
    elif multiplier != 0.0 and divides_in_kernel(optimizer):
        device = next((piece.device for group in optimizer.param_groups for piece in group["params"]), "cpu")
        # the attribute from which torch's fused optimizers read it; GradScaler sets the same one
        optimizer.grad_scale = torch.full((), 1.0 / multiplier, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]
    else:
        with torch.no_grad():
            for group in optimizer.param_groups:
                gradients = [piece.grad for piece in group["params"] if piece.grad is not None]
                if gradients:
                    torch._foreach_mul_(gradients, multiplier)
        optimizer.step()


def divides_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` is one of torch's own (a subclass's step may differ), with the
    fused kernel in every group.

    Its divisor is fp32, which would round a float64 gradient: those are not accepted. A hook would
    see gradients that are not divided yet.
    """
    fused = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in fused or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    if steps_otherwise(optimizer):
        return False
    return all(piece.dtype != torch.float64 for group in optimizer.param_groups for piece in group["params"])


def steps_otherwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks, or a replaced step of this object, may change what its class does. The
    step counter of torch's schedulers is neither."""
    step = vars(optimizer).get("step")
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    replaced = step is not None and getattr(step, "__func__", step) is not type(optimizer).step
    return replaced or any(_hooks_of(optimizer, _STEP_HOOKS))


def _hooks_of(optimizer: torch.optim.Optimizer, kinds: Sequence[str]) -> list[Any]:
    """Return the hooks that user code has registered in these tables."""
    hooks = [hook for kind in kinds for hook in (getattr(optimizer, kind, None) or {}).values()]
    # StepGuard, and the watch of a run's memory, look at no parameter
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("zero_trial.")]


class StepGuard:
    """Guards an optimizer whose steps belong to its engine.

    A hook raises on a step by user code, which would find no gradients and do nothing. The
    optimizer's zero_grad() is replaced with :meth:`zero_grad`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._open = False
        self._dropping: WeakMethod[Callable[[], None]] | None = None
        vars(optimizer)["zero_grad"] = self.zero_grad
        self._as_built = steps_otherwise(optimizer)
        self._checked: list[Any] = []  # the step and the hooks that :meth:`open` has accepted
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper may not call the base class
            optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._open:
            raise past_engine()

    def on_zero_grad(self, method: WeakMethod[Callable[[], None]]) -> None:
        """Make zero_grad() call ``method``, because gradients belong to the engine."""
        self._dropping = method

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the method that :meth:`on_zero_grad` has set."""
        drop = self._dropping() if self._dropping is not None else None
        if drop is not None:
            drop()

    @contextmanager
    def open(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Allow a step of the optimizer in the block. Raises ConfigError for unsupported hooks."""
        found = [vars(optimizer).get("step")]
        for kind in _STEP_HOOKS + _STATE_HOOKS:
            found += getattr(optimizer, kind, None) or ()  # numbers that torch gives to one hook only
        if found != self._checked:
            refuse_state_hooks(optimizer)
            if steps_otherwise(optimizer):
                self.refuse_late_hooks(optimizer)
            self._checked = found
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def refuse_late_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError unless the optimizer had hooks when it was built over whole tensors."""
        if not self._as_built:
            raise ConfigError(
                "hooks or a replaced step() were added to this optimizer after initialize()",
                where="optimizer",
                got=f"{type(optimizer).__name__}, which updates flat pieces of parameters on this rank",
                expected="hooks that see whole parameters and gradients",
                fix="Add them before initialize(), so that the optimizer gets whole tensors; or read gradients with safe_get_full_grad before "
                "engine.step().",
            )


def past_engine() -> TrialError:
    """Return the error for a step of an optimizer that its engine steps."""
    return TrialError(
        "the engine steps this optimizer: it first reduces, unscales and clips the gradients, and then gathers the parameters",
        where="optimizer.step",
        fix="Call engine.step() instead, and remove optimizer.zero_grad() and a GradScaler (fp16 in ds_config scales the loss).",
    )


def refuse_state_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for hooks on state dicts, which checkpoints do not use."""
    if _hooks_of(optimizer, _STATE_HOOKS):
        raise state_hooks(optimizer)


def state_hooks(optimizer: torch.optim.Optimizer) -> ConfigError:
    """Return the error for hooks on state dicts."""
    return ConfigError(
        "hooks on this optimizer's state dicts would not run: checkpoints store its state by tensor",
        where="optimizer",
        got=f"state_dict hooks on {type(optimizer).__name__}",
        fix="Remove them, and put what they add into client_state of engine.save_checkpoint().",
    )
