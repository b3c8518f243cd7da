"""state_dict() and load_state_dict() of a sharded module, and of any part of it: whole tensors out, whole tensors in.

torch calls the hooks of every module inside the one that was asked, outermost first. The outermost one opens what is inside it and closes it
again; the inner ones find everything open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero_trial.zero.hook import Hook
from zero_trial.zero.plan import Lifetime
from zero_trial.zero.unit import Unit


class WholeState:
    """Collective over shard: every rank must ask the same part. Tensors of freed parameters are handed out as copies of their own."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], wait: Callable[[], object]) -> None:
        self._wait = wait
        self._scope: nn.Module | None = None  # the part that was asked
        self._opened: list[Unit] = []
        self.handles: list[Any] = []
        holder = {id(param): unit for unit in units for param in unit.params}
        for part in module.modules():
            inside = list(
                {id(unit): unit for param in part.parameters() if (unit := holder.get(id(param))) is not None}.values()
            )
            if inside:
                self._install(part, inside)

    def _install(self, part: nn.Module, inside: list[Unit]) -> None:
        frees = any(unit.plan.params is not Lifetime.ALWAYS for unit in inside)
        self.handles += [
            part.register_state_dict_pre_hook(Hook(lambda module, *_: self._open(module, inside))),
            part.register_load_state_dict_pre_hook(Hook(lambda module, *_: self._open(module, inside))),
            part._register_state_dict_hook(Hook(functools.partial(self._given, copies=frees))),
            part.register_load_state_dict_post_hook(Hook(lambda module, _: self._taken(module, inside))),
        ]

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _open(self, part: nn.Module, inside: list[Unit]) -> None:
        self._wait()
        if self._scope is None or all(part is not inner for inner in self._scope.modules()):
            self._scope = part
        closed = [unit for unit in inside if not unit.live]
        for unit in closed:
            unit.start_gather()
        for unit in closed:
            unit.finish_gather()
        self._opened += closed

    def _given(self, part: nn.Module, state: dict[str, Any], prefix: str, _: object, *, copies: bool) -> None:
        """The part's own entries are views of buffers that will be freed: copies instead. Those of inner modules are copied already."""
        if copies:
            for name in (*part._parameters, *part._buffers):
                if torch.is_tensor(value := state.get(prefix + name)):
                    state[prefix + name] = value.clone()
        self._close(part)

    def _taken(self, part: nn.Module, inside: list[Unit]) -> None:
        if part is self._scope:
            loaded = {id(param) for param in part.parameters()}
            for unit in inside:
                unit.take_full(loaded)
        self._close(part)

    def _close(self, part: nn.Module) -> None:
        if part is self._scope:
            self._scope = None
            for unit in self._opened:
                unit.free()
            self._opened.clear()
