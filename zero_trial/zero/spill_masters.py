"""Takes each unit's master away as soon as the unit is built, so that the masters of a model are never in memory together."""

from __future__ import annotations

from zero_trial.zero.absent import absent
from zero_trial.zero.heap import give_freed_memory_back
from zero_trial.zero.spill_file import Shelf
from zero_trial.zero.unit import Unit


class MasterShelf:
    """Masters on a ``shelf``, and which units have their optimizer state there too: those whose shards have ``budget`` elements together (None:
    all). A unit goes as a whole, so that what stays may be more than was asked for, never less."""

    def __init__(self, shelf: Shelf, budget: int | None = None) -> None:
        self.shelf = shelf
        self.offsets: dict[int, int] = {}  # by id of the unit
        self._budget = budget
        self._chosen: set[int] = set()

    def take(self, unit: Unit) -> None:
        """The unit's master goes to the file, and reads as NaN. Units without one of their own (fp32, frozen) stay as they are."""
        if not self._chooses(unit):
            return
        self._chosen.add(id(unit))
        master = unit.master
        if master is unit.shard:
            return
        offset = self.offsets[id(unit)] = self.shelf.reserve(master.numel() * master.element_size())
        self.shelf.write(offset, master).wait()
        unit.master = absent(master.shape, master.dtype, master.device)
        del master
        give_freed_memory_back()

    def keeps_state_of(self, unit: Unit) -> bool:
        return id(unit) in self._chosen

    def _chooses(self, unit: Unit) -> bool:
        if not unit.trainable:
            return False
        if self._budget is None:
            return True
        if unit.layout.shard_numel > self._budget:
            return False
        self._budget -= unit.layout.shard_numel
        return True
