"""What was published and is still on its way to this rank, and who waits for it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from zero_trial.mesh import Pending, wait_all


class Arrivals:
    """Of the parameters of ``module`` that always live. ``under_way``: in the order in which they were sent."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.under_way: list[Pending] = []
        self._alarm: Any = None

    def wait(self) -> None:
        """Returns when every parameter that always lives is whole again, here and on the other ranks of the shard axis, which must come as far."""
        wait_all(self.arrive())

    def arrive(self) -> list[Pending]:
        """Returns when every parameter that always lives is whole again here; with what peers may still be reading."""
        if self._alarm is not None:
            self._alarm.remove()
            self._alarm = None
        pendings, self.under_way = self.under_way, []
        for pending in pendings:
            pending.arrive()
        return pendings

    def wait_when_called(self) -> None:
        """Whoever calls the module next, or any part of it, waits first until its parameters are whole here: that rank may be the only one that calls
        it. What was published with ``defer`` may then be edited. The hook is torch's global one and goes after that call."""
        if self.under_way and self._alarm is None:
            parts, this = {id(part) for part in self._module.modules()}, weakref.ref(self)

            def ring(module: nn.Module, _: object) -> None:
                if id(module) in parts and (arrivals := this()) is not None:
                    arrivals.arrive()

            self._alarm = register_module_forward_pre_hook(ring)
