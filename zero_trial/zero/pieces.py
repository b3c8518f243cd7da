"""How this rank's shards are cut into the pieces that an optimizer steps on, each of one optimizer group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers import Segment
from zero_trial.zero.landing import Landing
from zero_trial.zero.store import ShardPiece
from zero_trial.zero.unit import Unit

Make = Callable[..., ShardPiece]


def cut_pieces(
    landings: Sequence[Landing], *, whole_tensors: bool, most: int | None = None, make: Make = ShardPiece
) -> list[ShardPiece]:
    """This rank's pieces: one per unit and optimizer group, or one per tensor, in its shape (a scalar as (1,)), for optimizers that need
    whole tensors. ``most``: the former are cut at its multiples, counted from the shard's start. ``make`` builds each from ShardPiece's fields.

    The latter is possible only where nothing is sharded; otherwise ConfigError.
    """
    if whole_tensors and any(landing.unit.comm.size > 1 for landing in landings):
        raise ConfigError(
            "this optimizer needs whole tensors, and sharding cuts them",
            where="optimizer.type",
            fix="Use zero_optimization.stage 0, or an elementwise optimizer (Adam, AdamW, SGD, Lion, Adagrad, LAMB ...).",
        )
    return [
        piece
        for landing in landings
        for piece in (_tensors(landing, make) if whole_tensors else _runs(landing, most, make))
    ]


def _tensors(landing: Landing, make: Make) -> Iterator[ShardPiece]:
    unit = landing.unit
    for slot in unit.layout.slots:
        if slot.numel:
            group = next(group for group, (start, stop) in unit.runs.items() if start <= slot.offset < stop)
            end = slot.offset + slot.numel
            view = unit.master[slot.offset : end].view(slot.shape or (1,))
            yield make(unit, landing, group, slot.offset, end, nn.Parameter(view))


def _runs(landing: Landing, most: int | None, make: Make) -> Iterator[ShardPiece]:
    unit = landing.unit
    low, high = unit.layout.shard_range(unit.comm.index)
    for group, (start, stop) in sorted(unit.runs.items()):
        a, b = max(start, low) - low, min(stop, high) - low
        while a < b:
            end = b if most is None else min((a // most + 1) * most, b)
            yield make(unit, landing, group, a, end, nn.Parameter(unit.master[a:end]))
            a = end


def segments_of(pieces: Sequence[ShardPiece], units: Sequence[Unit]) -> tuple[dict[int, list[Segment]], int]:
    """Which elements of each piece (by id of its weight) belong to which tensor, and how many tensors there are.

    Tensors are numbered over all ``units``, which are the same on every rank: a rank may have no piece of some of them.
    """
    names = sorted({slot.name for unit in units for slot in unit.layout.slots})
    number = {name: index for index, name in enumerate(names)}
    segments: dict[int, list[Segment]] = {}
    for piece in pieces:
        listed = segments.setdefault(id(piece.weight), [])
        for part in piece.unit.layout.pieces(piece.unit.comm.index):
            low, high = max(part.offset, piece.low), min(part.offset + part.numel, piece.high)
            if low < high:
                listed.append(Segment(number[part.slot.name], low - piece.low, high - piece.low))
    return segments, len(names)
