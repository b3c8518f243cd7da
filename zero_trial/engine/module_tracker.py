"""To which module an operation belongs, in forward and in backward.

Forward: hooks keep the stack of modules under way. Backward: an operation belongs to the module in whose forward its autograd node was made; nodes
are known by their sequence number. (Hooks on gradients, as torch.utils.module_tracker has them, lose modules whose inputs need no gradient.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ModuleTracker:
    """Follows the modules of ``model`` between ``with``'s begin and end. :attr:`parents` has the interface that FlopCounterMode asks for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._made_in: dict[int, str] = {}  # sequence number of an autograd node -> module
        self._handles: list[Any] = []

    @property
    def parents(self) -> set[str]:
        """The names of the modules to which the operation under way belongs: "" is the model, and "Global" everything."""
        module = self._current()
        if module is None:
            return {"Global"}
        parts = module.split(".") if module else []
        return {"Global", "", *(".".join(parts[: end + 1]) for end in range(len(parts)))}

    def __enter__(self) -> ModuleTracker:
        for name, module in self._model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name), prepend=True)
            )
            self._handles.append(
                module.register_forward_hook(lambda *_, name=name: self._leave(name), always_call=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _leave(self, name: str) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()

    def _current(self) -> str | None:
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if self._stack:  # forward, also where backward does it again
            # The node of an operation is made just before the operation runs; one that needs no gradient makes none.
            self._made_in.setdefault(torch.autograd._get_sequence_nr() - 1, self._stack[-1])  # type: ignore[attr-defined]
            return self._stack[-1]
        return self._made_in.get(node._sequence_nr()) if node is not None else None
