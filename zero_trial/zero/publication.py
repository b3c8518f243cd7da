"""The way of new values from the masters to the parameters, unit by unit, as soon as the optimizer is done with each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zero_trial.mesh import Pending
from zero_trial.zero.store import ShardPiece
from zero_trial.zero.unit import Unit


class Publication:
    """One step's publication. Units go in the model's order on every rank, whatever order and share of them a rank updates.

    A rank may have no piece of a unit at all (its part is padding): the unit goes when its turn comes.
    """

    def __init__(
        self, units: Sequence[Unit], pieces: Sequence[ShardPiece], pending: list[Pending], *, lend: bool = True
    ) -> None:
        self._waiting = deque(units)
        self._pending = pending
        self._lend = lend
        self._left: dict[int, int] = {}
        self._unrounded: set[int] = set()
        for piece in pieces:
            self._left[id(piece.unit)] = self._left.get(id(piece.unit), 0) + 1

    def updated(self, pieces: Sequence[ShardPiece], rounded: bool) -> None:
        """These pieces' masters are new; ``rounded``: so are their 16-bit copies. Publishes every unit whose turn has come. Collective over shard."""
        for piece in pieces:
            self._left[id(piece.unit)] -= 1
            if not rounded:
                self._unrounded.add(id(piece.unit))
        while self._waiting and not self._left.get(id(self._waiting[0])):
            self._publish(self._waiting.popleft())

    def finish(self) -> None:
        """Publishes what is left. Collective over shard."""
        while self._waiting:
            self._publish(self._waiting.popleft())

    def _publish(self, unit: Unit) -> None:
        if not unit.trainable:
            unit.free()
            return
        rounded = id(unit) in self._left and id(unit) not in self._unrounded
        if (pending := unit.publish(rounded=rounded, lend=self._lend)) is not None:
            self._pending.append(pending)
