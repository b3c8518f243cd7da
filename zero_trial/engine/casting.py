"""Casting the floating tensors of nested inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every fp32, fp16 and bf16 tensor in tuples, lists and dicts cast to ``dtype``; everything else unchanged."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return leaf.to(dtype)
        return leaf

    return tree_map(cast, value)
