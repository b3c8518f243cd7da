"""This rank's buffers on one axis: tensors that peers read where they lie, and whether they have read them."""

from __future__ import annotations

import torch

from zero_trial.mesh.shared_homes import Home, Homes
from zero_trial.mesh.watch import Watch


class Buffers:
    """Makes buffers and waits for their readers. ``homes``: where they live; None where peers read nothing in place."""

    def __init__(self, axis: str, watch: Watch) -> None:
        self.homes: Homes | None = None
        self._name = f"the readers of a buffer over {axis}"
        self._watch = watch

    def make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros."""
        if self.homes is None or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.homes.empty(numel, dtype)

    def settle(self, tensor: torch.Tensor) -> None:
        """Returns when no peer reads any more where ``tensor`` lies. Raises MeshError where one does not come to read."""
        home = self._home_of(tensor)
        if home is not None and not home.settled:
            self._watch.board.waiting(self._name)
            try:
                home.settle(self._watch.timeout)
            except RuntimeError as error:
                self._watch.fail(self._name, error)
            self._watch.board.leave()

    def settled(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`settle` would return at once."""
        home = self._home_of(tensor)
        return home is None or home.settled

    def _home_of(self, tensor: torch.Tensor) -> Home | None:
        return None if self.homes is None or not self._watch.on_host(tensor) else self.homes.find(tensor)
