"""Tensors that a forward leaves on its modules instead of returning them: an auxiliary loss, say, through which gradients may come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_OWN = frozenset(vars(nn.Module()))  # what every module has


class SideOutputs:
    """Of ``block`` and all inside it, asked after each forward.

    torch's own modules leave nothing: they are looked at only where they hold an attribute that could be a tensor, or have got a new one
    (a user's hook does that). Price: one look at an attribute for each of the others', one comparison for each quiet module.
    """

    def __init__(self, block: nn.Module) -> None:
        self._telling: list[Mapping[str, Any]] = []
        self._quiet: list[tuple[Mapping[str, Any], int]] = []
        for module in block.modules():
            own = vars(module)
            if _is_quiet(module):
                self._quiet.append((own, len(own)))
            else:
                self._telling.append(own)

    def tensors(self) -> list[torch.Tensor]:
        """Those with a history that are there now."""
        tables = [*self._telling, *(own for own, size in self._quiet if len(own) != size)]
        return [
            value
            for own in tables
            for value in own.values()
            if value.__class__ is torch.Tensor and value.grad_fn is not None
        ]


def _is_quiet(module: nn.Module) -> bool:
    fixed = (value for name, value in vars(module).items() if name not in _OWN)
    return type(module).__module__.startswith("torch.nn.") and all(_cannot_be_tensor(value) for value in fixed)


def _cannot_be_tensor(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, tuple))
