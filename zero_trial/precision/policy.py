"""Which dtype each thing of training has: parameters, gradient buffer, communication, fp32 masters; and the loss scale
to start with.

The four dtypes are independent of each other and of the ZeRO stage: there is one numerics path, not an optimizer class
per combination.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zero_trial.errors import ConfigError
from zero_trial.precision.loss_scale import LossScale, StaticScale

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
    """``param``: what forward and backward compute with; ``grad``: the buffer in which micro-batches add up; ``comm``:
    what a reduce-scatter carries; ``master``: the weights and moments that the optimizer updates."""

    param: torch.dtype
    grad: torch.dtype
    comm: torch.dtype
    master: torch.dtype = torch.float32
    loss_scale: LossScale = field(default_factory=StaticScale)
    buffer: torch.dtype | None = None  # floating buffers; None: as the parameters

    @property
    def has_separate_master(self) -> bool:
        """False when the parameters themselves are what the optimizer updates (no second copy is needed)."""
        return self.master != self.param


def dtype_from_name(name: str, where: str) -> torch.dtype:
    """``fp32``, ``fp16`` or ``bf16``, in any case, or torch's long name; ``where`` is the dotted key for the error."""
    dtype = _DTYPES.get(name.lower())
    if dtype is None:
        raise ConfigError("not a dtype of training", where=where, got=repr(name), expected="fp32, fp16 or bf16")
    return dtype


def dtype_policy(
    precision: str = "fp32",
    *,
    grad_accum_dtype: str | None = None,
    communication_data_type: str | None = None,
    accumulation_steps: int = 1,
    master_dtype: str = "fp32",
    loss_scale: LossScale | None = None,
) -> DtypePolicy:
    """The policy for ds_config's values.

    Gradient buffer: ``grad_accum_dtype`` if given; else the parameters' dtype when one micro-batch makes a step; else
    fp32, because a sum of several 16-bit gradients in 16 bits loses what is below 2**-8 (bf16) or 2**-11 (fp16) of the
    sum at each addition. Communication: ``communication_data_type`` if given; else the gradient buffer's dtype, which
    needs no cast. ``loss_scale`` belongs to fp16 only and is an error elsewhere; fp16 without one starts unscaled.
    """
    param = dtype_from_name(precision, "precision")
    if grad_accum_dtype is not None:
        grad = dtype_from_name(grad_accum_dtype, "data_types.grad_accum_dtype")
    else:
        grad = param if accumulation_steps == 1 else torch.float32
    comm = (
        grad if communication_data_type is None else dtype_from_name(communication_data_type, "communication_data_type")
    )
    if loss_scale is not None and param != torch.float16:
        raise ConfigError(
            "loss scaling is for fp16 gradients",
            where="fp16.loss_scale",
            got=f"precision {precision}",
            expected="fp16",
            fix="Leave it out.",
        )
    master = dtype_from_name(master_dtype, "master dtype")
    return DtypePolicy(param, grad, comm, master, loss_scale if loss_scale is not None else StaticScale())
