"""Dtypes of training, loss scaling and autocast: plain frozen values, no collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zero_trial.errors import ConfigError, Diverged, TrialError

SCALE_FACTOR = 2.0
LARGEST_SCALE = 2.0**127  # twice this is inf in fp32, and the scaled loss is fp32


class ScaleUpdate(NamedTuple):
    """The next state, and the error that the engine raises on all ranks (None: continue)."""

    state: LossScale
    error: Diverged | None = None


@dataclass(frozen=True)
class StaticScale:
    """A scale that never changes; 1.0 means no scaling. A step with an overflow is skipped."""

    scale: float = 1.0

    def update(self, overflow: bool) -> ScaleUpdate:
        return ScaleUpdate(self)

    def to_json(self) -> dict[str, object]:
        return {"kind": "static", "scale": self.scale}

    def restored(self, state: Mapping[str, object]) -> StaticScale:
        """Return the configured static scale, whatever the checkpoint had."""
        return self


@dataclass(frozen=True)
class DynamicScale:
    """The next step's scale and its counters; ``update`` once per step, skipped ones too."""

    scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    hysteresis_left: int = -1  # -1: full, that is ``hysteresis``
    iteration: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        if self.hysteresis_left == -1:
            object.__setattr__(self, "hysteresis_left", self.hysteresis)

    def update(self, overflow: bool) -> ScaleUpdate:
        """Return the state after a step; ``overflow``: whether a gradient on any rank was not
        finite. Pure; every rank computes the same result."""
        return self._after_overflow() if overflow else self._after_clean_step()

    def _after_overflow(self) -> ScaleUpdate:
        seen = replace(self, iteration=self.iteration + 1, last_overflow=self.iteration)
        if self.hysteresis != 1 and self.hysteresis_left != 1:
            return ScaleUpdate(replace(seen, hysteresis_left=self.hysteresis_left - 1))
        if self.scale <= self.min_scale:
            return ScaleUpdate(seen, self._minimum_error())
        # the hysteresis is not refilled here: until a clean window, every further overflow halves
        # the scale
        return ScaleUpdate(replace(seen, scale=max(self.scale / SCALE_FACTOR, self.min_scale)))

    def _after_clean_step(self) -> ScaleUpdate:
        clean_steps = self.iteration - self.last_overflow - 1  # before this one
        grows = clean_steps > 0 and clean_steps % self.window == 0
        refill = self.consecutive_hysteresis or grows
        after = replace(
            self,
            iteration=self.iteration + 1,
            scale=min(self.scale * SCALE_FACTOR, LARGEST_SCALE) if grows else self.scale,
            hysteresis_left=self.hysteresis if refill else self.hysteresis_left,
        )
        return ScaleUpdate(after)

    def _minimum_error(self) -> Diverged:
        return Diverged(
            "gradients are not finite although the fp16 loss scale is already at its minimum",
            where=f"loss scale, optimizer step attempt {self.iteration}",
            got=f"scale {self.scale:g}",
            expected=f"a scale above fp16.min_loss_scale = {self.min_scale:g} that can be halved",
            fix="Look for inf or NaN in the loss, lower the learning rate, or use bf16.",
        )

    def to_json(self) -> dict[str, object]:
        """Return the values that a run changes; settings come from ds_config when it is loaded."""
        return {
            "kind": "dynamic",
            "scale": self.scale,
            "hysteresis_left": self.hysteresis_left,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
        }

    def restored(self, state: Mapping[str, object]) -> DynamicScale:
        """Return these settings with a checkpoint's counters, if it has any."""
        if state.get("kind") != "dynamic":
            return self
        return replace(
            self,
            scale=float(str(state["scale"])),
            hysteresis_left=min(int(str(state["hysteresis_left"])), self.hysteresis),
            iteration=int(str(state["iteration"])),
            last_overflow=int(str(state["last_overflow"])),
        )


LossScale = StaticScale | DynamicScale


class StepStatus:
    """The state of the engine's steps, for code that shows numbers to users. This base class is for
    loops without an engine: the loss is not scaled."""

    @property
    def scaler(self) -> LossScale:
        """The loss scale of the next backward pass, with its update rule."""
        return StaticScale()

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of a non-finite gradient."""
        return False

    def gradient_multiplier(self) -> float:
        """Return the factor from a reduced gradient shard to the averaged gradient."""
        return 1.0

    def restore_scaler(self, state: Mapping[str, Any]) -> None:
        """Restore a :attr:`scaler` from its JSON values."""


# --- dtypes of parameters, gradient buffers, communication and masters ----------------------------
#
# The four dtypes are independent of each other and of the ZeRO stage: there is one numerics path,
# not an optimizer class per combination.


_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class DtypePolicy:
    """``param``: dtype of forward and backward; ``grad``: of the buffer in which micro-batches are
    accumulated; ``comm``: of reduce-scatters; ``master``: of the weights and moments that the
    optimizer updates."""

    param: torch.dtype
    grad: torch.dtype
    comm: torch.dtype
    master: torch.dtype = torch.float32
    loss_scale: LossScale = field(default_factory=StaticScale)
    buffer: torch.dtype | None = None  # floating buffers; None: as the parameters
    keep_constants: bool = True  # fp32 buffers that are not saved stay fp32
    fp32_modules: tuple[str, ...] = ()  # ds_config's: see LivingDtypes

    @property
    def mixes_constants(self) -> bool:
        """Return whether fp32 buffers are used with 16-bit activations."""
        return self.keep_constants and self.param.itemsize == 2

    def wide(self, living: torch.dtype, usual: torch.dtype) -> torch.dtype:
        """Return the dtype of gradients or messages of parameters that live in ``living``: the
        ``usual`` one, or theirs if it is wider than that of the model's computation (float64, and
        fp32 in 16-bit training)."""
        return living if living.itemsize > self.param.itemsize else usual


def dtype_from_name(name: str, where: str) -> torch.dtype:
    """Return the dtype ``fp32``, ``fp16`` or ``bf16``, in any case, or by torch's long name;
    ``where`` is the dotted key for the error."""
    dtype = _DTYPES.get(name.lower())
    if dtype is None:
        raise ConfigError("not a training dtype", where=where, got=repr(name), expected="fp32, fp16 or bf16")
    return dtype


def dtype_policy(
    precision: str = "fp32",
    *,
    grad_accum_dtype: str | None = None,
    communication_data_type: str | None = None,
    accumulation_steps: int = 1,
) -> DtypePolicy:
    """Return the policy for ds_config's values.

    Gradient buffer: ``grad_accum_dtype`` if given; else the parameters' dtype if a step has one
    micro-batch; else fp32, because a sum of several 16-bit gradients in 16 bits loses everything
    below 2**-8 (bf16) or 2**-11 (fp16) of the sum at each addition. Communication:
    ``communication_data_type`` if given; else the gradient buffer's dtype, which needs no cast.
    """
    param = dtype_from_name(precision, "precision")
    if grad_accum_dtype is not None:
        grad = dtype_from_name(grad_accum_dtype, "data_types.grad_accum_dtype")
    else:
        grad = param if accumulation_steps == 1 else torch.float32
    comm = (
        grad if communication_data_type is None else dtype_from_name(communication_data_type, "communication_data_type")
    )
    return DtypePolicy(param, grad, comm)


# --- casts and autocast ---------------------------------------------------------------------------


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every fp32, fp16 and bf16 tensor in tuples, lists and dicts of ``value`` to ``dtype``;
    leave everything else unchanged."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return leaf.to(dtype)
        return leaf

    return tree_map(cast, value)


def autocast_dtype(enabled: bool, dtype: str | None) -> torch.dtype | None:
    """Return the dtype of ``torch_autocast``: None if it is off, bf16 by default, as in
    DeepSpeed. Only the forward runs in it."""
    return dtype_from_name(dtype or "bf16", "torch_autocast.dtype") if enabled else None


def forward_of(module: nn.Module, dtype: torch.dtype | None, device_type: str) -> Callable[..., Any]:
    """Return a function that calls ``module``: unchanged (None), or under autocast to ``dtype``,
    which overrides an autocast around the call."""
    if dtype is None:
        return module.__call__

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return module(*args, **kwargs)

    return call


def explain_dtypes(call: Callable[..., Any], wide: Sequence[str]) -> Callable[..., Any]:
    """Return ``call`` with an error that names fp32 tensors (``wide``) if dtypes meet."""

    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if "dtype" not in str(error) or not wide or isinstance(error, TrialError):
                raise
            raise TrialError(
                "two dtypes meet in the forward",
                where=f"tensors that stay fp32 ({', '.join(wide[:3])}{' ...' if wide[3:] else ''})",
                got=str(error).splitlines()[0],
                fix="Cast the results computed from them to the activations' dtype. data_types.buffer_dtype casts such buffers; a "
                "module that stays fp32 only casts the inputs and outputs of its own forward.",
            ) from error

    return explained if wide else call
