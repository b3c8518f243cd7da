"""Publishes updated parameters: each group's all-gather starts as soon as its update is done."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from zero_trial.comm import Pending, wait_all
from zero_trial.sharding.param_group import ParamGroup, trace_range


class Updated(Protocol):
    """A part of a group that an optimizer updates."""

    @property
    def group(self) -> ParamGroup: ...


class ParamPublisher:
    """Publishes the groups of one model after each update, in the model's order on every rank,
    whatever share of them a rank updates.

        update 0 | all-gather 0 ...........
                 | update 1 | all-gather 1 ...
                            | next forward: waits here (deferred), or at the end of the step

    Moves n (N-1)/N elements per step for the parameters that always live and are sharded. Those
    whose home has the full copy are gathered in the same way and go home, at most two groups at a
    time.
    """

    def __init__(self, module: nn.Module, groups: Sequence[ParamGroup]) -> None:
        self._module = module
        self._groups = groups
        self._queue: deque[ParamGroup] = deque()  # not published yet in this step
        self._pieces_left: dict[int, int] = {}  # by id of the group
        self._unrounded: set[int] = set()
        self._lend = True
        self.under_way: list[Pending] = []  # in the order in which they were sent
        self._homeward: deque[tuple[ParamGroup, Pending]] = deque()
        self._hook: Any = None

    def begin(self, pieces: Sequence[Updated] = (), *, lend: bool = True) -> None:
        """Prepare for an update of ``pieces``. ``lend``: see :meth:`ParamGroup.publish`."""
        self._queue = deque(self._groups)
        self._lend = lend
        self._pieces_left.clear()
        self._unrounded.clear()
        for piece in pieces:
            self._pieces_left[id(piece.group)] = self._pieces_left.get(id(piece.group), 0) + 1

    def updated(self, pieces: Sequence[Updated], rounded: bool) -> None:
        """Publish each group whose turn has come, now that the masters of ``pieces`` are new.
        Collective over shard.

        ``rounded``: their 16-bit copies are new, too. A rank may have no piece of a group at all
        (its part is padding): the group goes when its turn comes.
        """
        for piece in pieces:
            self._pieces_left[id(piece.group)] -= 1
            if not rounded:
                self._unrounded.add(id(piece.group))
        while self._queue and not self._pieces_left.get(id(self._queue[0])):
            self._publish(self._queue.popleft())

    def finish(self) -> None:
        """Publish the remaining groups. :meth:`wait` or :meth:`wait_at_next_forward` must follow.
        Collective over shard."""
        while self._queue:
            self._publish(self._queue.popleft())
        self._bring_home(0)

    def publish_frozen(self) -> None:
        """Publish the groups that no step changes: their values were replaced (a checkpoint was
        read). Collective over shard."""
        for group in self._groups:
            if not group.trainable:
                self._note(group, group.publish())
        self._bring_home(0)

    def _publish(self, group: ParamGroup) -> None:
        if not group.trainable:
            group.reshard()
            return
        with trace_range("publish"):
            rounded = id(group) in self._pieces_left and id(group) not in self._unrounded
            self._note(group, group.publish(rounded=rounded, lend=self._lend))

    def _note(self, group: ParamGroup, pending: Pending | None) -> None:
        if pending is not None and group.plan.whole_home:
            self._homeward.append((group, pending))
            self._bring_home(1)
        elif pending is not None:
            self.under_way.append(pending)

    def _bring_home(self, keep: int) -> None:
        """Finish all but ``keep`` of the publications whose values go to a home."""
        while len(self._homeward) > keep:
            group, pending = self._homeward.popleft()
            pending.wait()
            group.finish_publish()

    def wait(self) -> None:
        """Wait until every parameter that always lives is whole here and on the other ranks of the
        shard axis, which must come as far."""
        wait_all(self.wait_result())

    def wait_result(self) -> Sequence[Pending]:
        """Wait until every parameter that always lives is whole here; return the exchanges whose
        input peers may still be reading."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if not self.under_way:
            return ()
        pendings, self.under_way = self.under_way, []
        for pending in pendings:
            pending.wait_result()
        return pendings

    def wait_at_next_forward(self) -> None:
        """Defer the wait to the next forward of the module, or of any part of it.

        One rank alone may call that, so it waits for the result alone: what was published with
        ``lend=False`` may be edited then. The hook is torch's global one, because any part may be
        called first; it is removed after that call.
        """
        if self.under_way and self._hook is None:
            parts, this = {id(part) for part in self._module.modules()}, weakref.ref(self)

            def before_forward(module: nn.Module, _: object) -> None:
                if id(module) in parts and (publisher := this()) is not None:
                    publisher.wait_result()

            self._hook = register_module_forward_pre_hook(before_forward)
