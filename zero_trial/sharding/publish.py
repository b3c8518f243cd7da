"""The way of new values from the masters to the parameters, group by group, as soon as the optimizer is done with each."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from zero_trial.comm import Pending, wait_all
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece


class ParamPublisher:
    """One step's publication. Groups go in the model's order on every rank, whatever order and share of them a rank updates.

    A rank may have no piece of a group at all (its part is padding): the group goes when its turn comes.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], pieces: Sequence[ShardPiece], pending: list[Pending], *, lend: bool = True
    ) -> None:
        self._waiting = deque(groups)
        self._pending = pending
        self._lend = lend
        self._left: dict[int, int] = {}
        self._unrounded: set[int] = set()
        for piece in pieces:
            self._left[id(piece.group)] = self._left.get(id(piece.group), 0) + 1

    def updated(self, pieces: Sequence[ShardPiece], rounded: bool) -> None:
        """These pieces' masters are new; ``rounded``: so are the 16-bit copies. Publishes each group in its turn. Collective over shard."""
        for piece in pieces:
            self._left[id(piece.group)] -= 1
            if not rounded:
                self._unrounded.add(id(piece.group))
        while self._waiting and not self._left.get(id(self._waiting[0])):
            self._publish(self._waiting.popleft())

    def finish(self) -> None:
        """Publishes what is left. Collective over shard."""
        while self._waiting:
            self._publish(self._waiting.popleft())

    def _publish(self, group: ParamGroup) -> None:
        if not group.trainable:
            group.free()
            return
        rounded = id(group) in self._left and id(group) not in self._unrounded
        if (pending := group.publish(rounded=rounded, lend=self._lend)) is not None:
            self._pending.append(pending)


# What was published and is still on its way to this rank, and who waits for it.


class DeferredGathers:
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
            pending.wait_result()
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
