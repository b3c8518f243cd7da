"""Where each piece's part of each column is: in a file, and in whichever buffer the piece is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zero_trial.zero.layout import round_up
from zero_trial.zero.spill_file import BLOCK, Shelf
from zero_trial.zero.spill_masters import MasterShelf
from zero_trial.zero.spill_shards import ShardShelf
from zero_trial.zero.state_columns import Column
from zero_trial.zero.store import ShardPiece
from zero_trial.zero.unit import Unit

MASTER = "master"
ROUNDED = "rounded"  # the 16-bit copy: an update writes it and never reads it


@dataclass(frozen=True)
class Place:
    """``numel`` elements of one column."""

    shelf: Shelf
    offset: int  # bytes, in the file
    start: int  # bytes, in the buffer; the same remainder by BLOCK as in the file
    dtype: torch.dtype
    numel: int

    def of_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._of(buffer, self.start)

    def of_file(self, area: torch.Tensor) -> torch.Tensor:
        return self._of(area, self.offset)

    def _of(self, area: torch.Tensor, start: int) -> torch.Tensor:
        return area[start : start + self.numel * self.dtype.itemsize].view(self.dtype)


# Where a column of a unit's shard begins: which file, at which byte, and how wide it is.
Region = tuple[Shelf, int, torch.dtype]


def regions_of(
    unit: Unit,
    columns: Mapping[torch.dtype, Sequence[Column]],
    masters: MasterShelf | None,
    shards: ShardShelf | None,
) -> dict[str, Region]:
    """Everything of the unit's that lies in a file, by kind; room for its state is reserved.

    A shard that is its own master is the column MASTER; else MASTER and ROUNDED are two, in whatever file each is.
    """
    found: dict[str, Region] = {}
    wide = unit.master.dtype
    home = shards.offset_of(unit) if shards is not None else None
    if masters is not None and id(unit) in masters.offsets:
        found[MASTER] = masters.shelf, masters.offsets[id(unit)], wide
    if shards is not None and home is not None:
        kind = MASTER if unit.master is unit.shard else ROUNDED
        found[kind] = shards.shelf, home, unit.dtype
    if masters is not None and masters.keeps_state_of(unit):
        for column in columns.get(wide, ()):
            offset = masters.shelf.reserve(unit.layout.shard_numel * column.dtype.itemsize)
            found[column.kind] = masters.shelf, offset, column.dtype
    return found


def places_of(piece: ShardPiece, regions: Mapping[str, Region], slot_numel: int) -> tuple[dict[str, Place], int]:
    """The piece's places by kind, and the bytes of a buffer for pieces of ``slot_numel`` elements at most."""
    places, start = {}, 0
    for kind, (shelf, begin, dtype) in regions.items():
        offset = begin + piece.low * dtype.itemsize
        places[kind] = Place(shelf, offset, start + offset % BLOCK, dtype, piece.numel)
        start += room_for(slot_numel, dtype)
    return places, start


def room_for(numel: int, dtype: torch.dtype) -> int:
    """Bytes for that many elements, wherever in a block they begin."""
    return round_up(numel * dtype.itemsize, BLOCK) + BLOCK
