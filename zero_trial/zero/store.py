"""Where a shard's fp32 master weights and moments live between steps, behind ``borrow`` and ``give_back``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zero_trial.zero.landing import Landing
from zero_trial.zero.unit import Unit


@dataclass(frozen=True)
class ShardPiece:
    """Elements [low, high) of a unit's shard that belong to one optimizer group; ``weight`` (high-low,) is that part of the master."""

    unit: Unit
    landing: Landing
    group: int
    low: int
    high: int
    weight: nn.Parameter

    @property
    def numel(self) -> int:
        return self.high - self.low

    def gradient(self) -> torch.Tensor:
        """The reduced gradient in the master's dtype and the weight's shape: a view where dtypes agree, else a new tensor (4 bytes per element)."""
        return self.reduced.to(self.weight.dtype).view(self.weight.shape)

    @property
    def reduced(self) -> torch.Tensor:
        """The reduced gradient as it lies there, (high-low,), in the dtype in which it was summed."""
        return self.landing.shard[self.low : self.high]

    @property
    def rounded(self) -> torch.Tensor | None:
        """Where the weight's rounded copy belongs, (high-low,): this piece of the 16-bit shard; None where the weight is the shard itself."""
        unit = self.unit
        return None if unit.master is unit.shard else unit.shard[self.low : self.high]


class StateStore(Protocol):
    """Gives out the pieces of a step batch by batch. Between ``borrow`` and ``give_back`` their weights and moments are where the update runs."""

    def expect(self) -> None:
        """A step is coming, unless it is skipped: what it needs first may be brought nearer."""
        ...

    def batches(self) -> Iterator[Sequence[ShardPiece]]: ...

    def borrow(self, batch: Sequence[ShardPiece]) -> None: ...

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """``rounded``: the update has made the 16-bit copies. Whether they are there now."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Inside, all masters and all state can be read and written; only between steps."""
        ...

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """State of zeros for a piece where the store keeps that kind, None where it keeps none of it; only inside :meth:`lent`."""
        ...

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        """Bytes of memory that a state tensor takes between steps."""
        ...

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Memory of the store's own."""
        ...

    def close(self) -> None:
        """Nothing will be borrowed any more: space outside of memory is given back, and what lay there is lost."""
        ...


class DeviceStore:
    """Everything stays on the compute device. Price: K bytes per parameter and shard (12 for Adam: master, two moments), no traffic.

    Pieces go in one batch when their gradients need no cast; else in batches of at most ``cast_numel`` elements, which bounds the fp32 copies.
    ``by_unit``: one batch per unit, for an optimizer that needs no casts and whose results can be published while it goes on.
    """

    def __init__(self, pieces: Sequence[ShardPiece], cast_numel: float = 1 << 26, *, by_unit: bool = False) -> None:
        if by_unit:
            units: dict[int, list[ShardPiece]] = {}
            for piece in pieces:
                units.setdefault(id(piece.unit), []).append(piece)
            self._batches = list(units.values())
            return
        self._batches = [[]]
        room = cast_numel
        for piece in pieces:
            needs = 0 if piece.landing.shard.dtype == piece.weight.dtype else piece.numel
            if needs > room and self._batches[-1]:
                self._batches.append([])
                room = cast_numel
            self._batches[-1].append(piece)
            room -= needs

    def expect(self) -> None:
        return None

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        return iter(self._batches)

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        return None

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        return rounded

    def lent(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        return None

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        return value.numel() * value.element_size()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return ()

    def close(self) -> None:
        return None
