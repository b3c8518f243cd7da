"""A range of elements of a named logical tensor, and the memory on this rank that holds it or is to receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from zero_trial.errors import CheckpointError


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of ``name``, flattened in row-major order; ``tensor`` holds exactly these, contiguously.

    ``shape`` is the whole logical tensor's. Padding of a shard belongs to no slice. Of replicas, one rank gives the
    slice.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        numel = prod(self.shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise CheckpointError(
                "a slice lies outside its tensor",
                where=self.name,
                got=f"elements {self.start} to {self.stop}",
                expected=f"0 to {numel}, for shape {self.shape}",
            )
        if self.tensor.numel() != self.stop - self.start or not self.tensor.is_contiguous():
            raise CheckpointError(
                "a slice's memory does not fit its range",
                where=self.name,
                got=f"{self.tensor.numel()} elements{'' if self.tensor.is_contiguous() else ', not contiguous'}",
                expected=f"{self.stop - self.start} contiguous elements",
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def flat(self) -> torch.Tensor:
        """The memory as one dim, without a copy."""
        return self.tensor.detach().view(-1)

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Slice:
        """All of a tensor; a copy is made only if it is not contiguous (then it is for saving, not for loading)."""
        detached = tensor.detach()
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), detached.contiguous())


def ranges(slices: Sequence[Slice]) -> dict[str, list[tuple[int, int]]]:
    """name -> its ranges, in order, without empty ones."""
    out: dict[str, list[tuple[int, int]]] = {}
    for part in slices:
        if part.start < part.stop:
            out.setdefault(part.name, []).append((part.start, part.stop))
    return {name: sorted(found) for name, found in out.items()}
