"""``torch_autocast``: the module's forward under torch.autocast. Parameters, gradients and what crosses the wire keep their dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_trial.precision.policy import dtype_from_name


def autocast_dtype(enabled: bool, dtype: str | None) -> torch.dtype | None:
    """The dtype of ``torch_autocast``: None when it is off, bf16 when nothing is said, as in DeepSpeed."""
    return dtype_from_name(dtype or "bf16", "torch_autocast.dtype") if enabled else None


def forward_of(module: nn.Module, dtype: torch.dtype | None, device_type: str) -> Callable[..., Any]:
    """How to call ``module``: as it is (None), or under autocast to ``dtype``. An autocast around the call gives way to this one."""
    if dtype is None:
        return module.__call__

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return module(*args, **kwargs)

    return call
