"""A domain: parameters that are gathered, freed and reduced together, when they are told to, such as those of one chunk of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_trial.mesh import AxisComm


@dataclass(frozen=True)
class Domain:
    """``params`` holds ids. ``copies`` are the ranks that hold the same parameters for other layers (tied weights), None where nobody does.

    Copies have the same shapes in the same order on all their ranks, and so the same layout: each rank exchanges the shard that it owns.
    """

    name: str
    params: frozenset[int]
    copies: AxisComm | None = None
    owner: int = 0  # the index among the copies of the one whose first values count
    module: str = ""  # with copies: the dotted name of the module that holds all of it

    @property
    def owned(self) -> bool:
        """Of several copies the owner's rank counts the norm and writes the checkpoint."""
        return self.copies is None or self.copies.index == self.owner

    def agree(self, values: torch.Tensor, label: str) -> None:
        """Overwrites ``values`` with the owner's. Collective over the copies."""
        if self.copies is not None:
            self.copies.broadcast(values, label, self.owner)

    @property
    def holders(self) -> int:
        return self.copies.size if self.copies is not None else 1
