"""Batches on their way to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class DeviceMover:
    """Moves tensors inside nested dicts, lists and tuples; says once per type that it leaves something where it is."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._unknown: set[type] = set()

    def move(self, data: Any, device: torch.device) -> Any:
        if isinstance(data, torch.nn.Module) or hasattr(data, "to"):
            return data.to(device)
        if isinstance(data, Mapping):
            return {key: self.move(value, device) for key, value in data.items()}
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self.move(value, device) for value in data))
        if isinstance(data, (list, tuple)):
            return type(data)(self.move(value, device) for value in data)
        if type(data).__module__ == "numpy" and getattr(data, "ndim", None):
            return torch.as_tensor(data, device=device)
        if (
            data is not None
            and not isinstance(data, (int, float, str, bytes, bool))
            and type(data) not in self._unknown
        ):
            self._unknown.add(type(data))
            self._note(
                f"to_device leaves {type(data).__name__} where it is: only tensors, dicts, lists and tuples are moved"
            )
        return data
