"""What a parameter holds while its values are elsewhere: its full shape over a single element that no use can overlook."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``shape`` over one NaN: no memory, and any arithmetic with it shows. Integers, which have no NaN, get their largest value."""
    numbers = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    value = float("nan") if numbers else torch.iinfo(dtype).max
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are elsewhere: it has elements and no memory of its own for them."""
    return tensor.numel() > 1 and not any(tensor.stride())
