"""A placement: which pipeline rank holds which chunk of the model. Pure.

loop, 3 ranks, 2 chunks each        V, 3 ranks, always 2 chunks each
rank 0   chunks 0 3                 rank 0   chunks 0 5    both ends: the loss comes out where the data goes in
rank 1   chunks 1 4                 rank 1   chunks 1 4
rank 2   chunks 2 5                 rank 2   chunks 2 3    the turn: no message between them
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """``ranks[c]`` is the pipeline rank of chunk c."""

    ranks: tuple[int, ...]

    @classmethod
    def loop(cls, stages: int, chunks_per_rank: int = 1) -> Placement:
        """Chunk c on rank c mod ``stages``."""
        return cls(tuple(range(stages)) * chunks_per_rank)

    @classmethod
    def v(cls, stages: int) -> Placement:
        """Down the ranks and up again: two chunks on each."""
        return cls((*range(stages), *reversed(range(stages))))

    @cached_property
    def stages(self) -> int:
        """Number of pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def chunks(self) -> int:
        """Number of chunks of the model."""
        return len(self.ranks)

    @property
    def last(self) -> int:
        """The chunk that computes the loss."""
        return len(self.ranks) - 1

    def of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the model's order."""
        return tuple(chunk for chunk, holder in enumerate(self.ranks) if holder == rank)

    def sends_forward(self, chunk: int) -> bool:
        """Whether the chunk's output goes to another rank."""
        return chunk < self.last and self.ranks[chunk] != self.ranks[chunk + 1]

    def sends_backward(self, chunk: int) -> bool:
        """Whether the gradient of the chunk's input goes to another rank."""
        return chunk > 0 and self.ranks[chunk] != self.ranks[chunk - 1]
