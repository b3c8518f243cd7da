"""Where an update's new 16-bit values lie until they are on their way to a file."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_trial.zero.store import ShardPiece


class Outbox:
    """Room for the new values of each piece that is being updated."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def open(self, piece: ShardPiece, room: torch.Tensor) -> None:
        """``room`` (numel,) takes the piece's new values from now on."""
        self._of[id(piece)] = room

    def take(self, piece: ShardPiece) -> torch.Tensor:
        """The room, which is the piece's no more."""
        return self._of.pop(id(piece))

    def clear(self) -> None:
        """Of a step that was broken off."""
        self._of.clear()

    def room(self, piece: ShardPiece) -> torch.Tensor | None:
        """None for a piece whose values are not rounded, or that is not being updated."""
        return self._of.get(id(piece))


@dataclass(frozen=True)
class SpilledPiece(ShardPiece):
    """A piece of a unit whose shard may lie in a file; then new values go to the outbox."""

    outbox: Outbox

    @property
    def rounded(self) -> torch.Tensor | None:
        """In the outbox during the piece's update, or in the shard, where that is in memory."""
        return super().rounded if self.unit.away is None else self.outbox.room(self)
