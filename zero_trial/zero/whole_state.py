"""state_dict() and load_state_dict() of a sharded module, and of any part of it: whole tensors out, whole tensors in.

torch calls the hooks of every module inside the one that was asked, outermost first. Each module's own parameters are gathered when its turn
comes and freed when another group's turn has come, so that the device holds one group at a time and never the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_trial.zero.hook import Hook
from zero_trial.zero.plan import Lifetime
from zero_trial.zero.unit import Unit


class WholeState:
    """Collective over shard: every rank must ask the same part.

    Where parameters are freed, ``state_dict`` hands out copies in the host's memory, on every rank of the axis.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], wait: Callable[[], object]) -> None:
        self._wait = wait
        self._scope: nn.Module | None = None  # the part that was asked
        self._loading = False
        self._opened: list[Unit] = []
        self.handles: list[Any] = []
        self._copies = any(unit.plan.params is not Lifetime.ALWAYS for unit in units)
        unit_of = {id(param): unit for unit in units for param in unit.params}
        for part in module.modules():
            if inside := _units_of(part.parameters(), unit_of):
                self._install(part, inside, _units_of(part.parameters(recurse=False), unit_of))

    def _install(self, part: nn.Module, inside: list[Unit], own: list[Unit]) -> None:
        self.handles += [
            part.register_state_dict_pre_hook(Hook(lambda module, *_: self._open(module, own, loading=False))),
            part.register_load_state_dict_pre_hook(Hook(lambda module, *_: self._open(module, own, loading=True))),
            part._register_state_dict_hook(Hook(self._given)),
            part.register_load_state_dict_post_hook(Hook(lambda module, _: self._taken(module, inside))),
        ]

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _open(self, part: nn.Module, own: list[Unit], *, loading: bool) -> None:
        """Gathers the units of the part's own parameters, in place of those of the part before it."""
        if self._scope is None or part is self._scope or all(part is not inner for inner in self._scope.modules()):
            self._wait()
            self._loading = False  # what an earlier call left open when it failed is dropped
            self._close(())
            self._scope, self._loading = part, loading
        self._close(own)
        closed = [unit for unit in own if not unit.live]
        for unit in closed:
            unit.start_gather()
        for unit in closed:
            unit.finish_gather()
        self._opened += closed

    def _given(self, part: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """The part's own entries are views of buffers that will be freed: copies instead. Those of inner modules are copied already."""
        if self._copies:
            for name in (*part._parameters, *part._buffers):
                if torch.is_tensor(value := state.get(prefix + name)):
                    state[prefix + name] = value.to("cpu", copy=True)
        if part is self._scope:
            self._close(())
            self._scope = None

    def _taken(self, part: nn.Module, inside: list[Unit]) -> None:
        if part is self._scope:
            loaded = _ids(part)
            for unit in inside:
                if unit.live and unit not in self._opened:
                    unit.take_full(loaded)
            self._close(())
            self._scope, self._loading = None, False

    def _close(self, keep: Collection[Unit]) -> None:
        """Frees the units that were gathered here, but for ``keep``; what was loaded into them goes to the shards before."""
        loaded = _ids(self._scope) if self._loading and self._scope is not None else None
        for unit in [unit for unit in self._opened if unit not in keep]:
            if loaded is not None and unit.live:
                unit.take_full(loaded)
            unit.free()
            self._opened.remove(unit)


def _ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}


def _units_of(params: Iterable[nn.Parameter], unit_of: Mapping[int, Unit]) -> list[Unit]:
    """The units that hold any of ``params``, in the order of first sight."""
    found = [unit for param in params if (unit := unit_of.get(id(param))) is not None]
    return list(dict.fromkeys(found))
