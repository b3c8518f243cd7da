"""Publishes updated parameters: each group's all-gather starts as soon as its update is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from zero_trial.comm import Pending, wait_all
from zero_trial.sharding.param_group import ParamGroup, trace_range
from zero_trial.sharding.unshard import Unsharder


class Updated(Protocol):
    """A part of a group that an optimizer updates."""

    @property
    def group(self) -> ParamGroup: ...


class ParamPublisher:
    """Publishes the groups of one model after each update, in the model's order on every rank,
    whatever share of them a rank updates.

        update 0 | all-gather 0 ...........
                 | update 1 | all-gather 1 ...
                            | the end of the step waits for all

    Moves n (N-1)/N elements per step for the parameters that always live and are sharded. Those
    whose home has the full copy are gathered in the same way and go home, at most two groups at a
    time.

    Full values that do not always live are freed first (by the unsharder): the update has made
    them stale.
    """

    def __init__(self, groups: Sequence[ParamGroup], unsharder: Unsharder) -> None:
        self._groups = groups
        self._unsharder = unsharder
        self._queue: deque[ParamGroup] = deque()  # not published yet in this step
        self._pieces_left: dict[int, int] = {}  # by id of the group
        self._unrounded: set[int] = set()
        self._under_way: list[Pending] = []  # in the order in which they were sent
        self._homeward: deque[tuple[ParamGroup, Pending]] = deque()

    def begin(self, pieces: Sequence[Updated] = ()) -> None:
        """Prepare for an update of ``pieces``."""
        self._queue = deque(self._groups)
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
        """Publish the remaining groups; return when all parameters are whole on every rank of the
        shard axis. Collective over shard."""
        while self._queue:
            self._publish(self._queue.popleft())
        self._wait()

    def publish_frozen(self) -> None:
        """Publish the groups that no step changes: their values were replaced (a checkpoint was
        read). Collective over shard."""
        for group in self._groups:
            if not group.trainable:
                self._start(group, rounded=False)
        self._wait()

    def publish_now(self, group: ParamGroup) -> None:
        """Publish the master of one group between steps, and wait until every rank has the new full
        copy, here or in its home. Collective over shard."""
        self._start(group, rounded=False)
        self._wait()

    def _publish(self, group: ParamGroup) -> None:
        if not group.trainable:
            self._unsharder.free(group)
            return
        with trace_range("publish"):
            self._start(group, rounded=id(group) in self._pieces_left and id(group) not in self._unrounded)

    def _start(self, group: ParamGroup, *, rounded: bool) -> None:
        self._unsharder.free(group, stale=True)
        pending = group.publish(rounded=rounded)
        if pending is not None and group.plan.whole_home:
            self._homeward.append((group, pending))
            self._bring_home(1)
        elif pending is not None:
            self._under_way.append(pending)

    def _bring_home(self, keep: int) -> None:
        """Finish all but ``keep`` of the publications whose values go to a home."""
        while len(self._homeward) > keep:
            group, pending = self._homeward.popleft()
            pending.wait()
            group.finish_publish()

    def _wait(self) -> None:
        self._bring_home(0)
        pendings, self._under_way = self._under_way, []
        wait_all(pendings)
