"""Publishes updated parameters: each group's all-gather starts as soon as its update is done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from zero_trial.comm import Pending
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
        self._under_way: list[Pending] = []  # in the order in which they were sent
        self._homeward: deque[tuple[ParamGroup, Pending]] = deque()

    def publish(self, pieces: Sequence[Updated] = (), updates: Iterable[tuple[Sequence[Updated], bool]] = ()) -> None:
        """Publish each group as soon as the ``updates`` of its ``pieces`` are done; return when all
        parameters are whole on every rank of the shard axis. Collective over shard.

        The groups go in the model's order on every rank, because a collective needs one order, and
        ranks finish groups in different ones: a rank may have no piece of a group at all (its part
        is padding), and pieces of one group may come in several updates. A group whose update is
        done waits for those before it.

        Args:
            pieces: all that ``updates`` yields; without them, all groups are published.
            updates: yields the pieces whose masters are new, and whether their 16-bit copies are.
        """
        left, unrounded, queue = Counter(id(piece.group) for piece in pieces), set(), deque(self._groups)
        for done, rounded in updates:
            for piece in done:
                left[id(piece.group)] -= 1
                if not rounded:
                    unrounded.add(id(piece.group))
            while queue and not left[id(queue[0])]:
                group = queue.popleft()
                self._publish(group, rounded=id(group) in left and id(group) not in unrounded)
        for group in queue:
            self._publish(group, rounded=id(group) in left and id(group) not in unrounded)
        self._wait()

    def publish_frozen(self) -> None:
        """Publish the groups that no step changes: their values were replaced (a checkpoint was
        read). Collective over shard."""
        for group in self._groups:
            if not group.trainable:
                self._publish(group, rounded=False, replaced=True)
        self._wait()

    def publish_now(self, group: ParamGroup) -> None:
        """Publish the master of one group between steps, and wait until every rank has the new full
        copy, here or in its home. Collective over shard."""
        self._publish(group, rounded=False)
        self._wait()

    def _publish(self, group: ParamGroup, *, rounded: bool, replaced: bool = False) -> None:
        """Publish ``group``, whose full values the update has made stale. Those of a frozen group
        are only freed, if they do not always live, unless something has ``replaced`` them."""
        if not (group.trainable or replaced):
            self._unsharder.free(group)
            return
        with trace_range("publish"):
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
        if self._homeward:
            self._bring_home(0)
        pendings, self._under_way = self._under_way, []
        for pending in pendings:
            pending.wait()
