"""The device that a rank computes on: which one there is, and what torch offers for it.

An accelerator is CUDA, or the device that another package has registered with torch (PrivateUse1).
torch has a module for each kind, ``torch.cuda`` for CUDA, with the same names for streams, events,
memory and generators; ask :func:`torch_module` for it instead of naming one.
"""

from __future__ import annotations

from typing import Any

import torch


def accelerator() -> str | None:
    """Return the kind of accelerator that ranks compute on; None where they compute on the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    kind: str = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, kind, None)
    return kind if module is not None and module.is_available() else None


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on ``device`` is queued, in memory of its own."""
    return device.type not in ("cpu", "meta")


def torch_module(device: torch.device | str) -> Any:
    """Return torch's module for an accelerator: streams, events, memory figures, generators."""
    return torch.get_device_module(device)


def own_device(local_rank: int | None = None) -> torch.device:
    """Return this local rank's, or else the current, accelerator; the CPU without one."""
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    module = torch_module(kind)
    return torch.device(kind, module.current_device() if local_rank is None else local_rank % module.device_count())
