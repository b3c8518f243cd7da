"""The place of offloaded state in a rehearsal: buffers in memory, as the run will have them, and no disk behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zero_trial.config.sections import AioSection
from zero_trial.engine.offload import Places
from zero_trial.zero.layout import round_up
from zero_trial.zero.mover import PlainMover
from zero_trial.zero.spill_file import BLOCK, Ticket


class ImaginedShelf:
    """Transfers move nothing and are over at once: what is read is what the buffer held."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self._end = 0

    def reserve(self, nbytes: int) -> int:
        offset, self._end = self._end, self._end + round_up(nbytes, BLOCK)
        return offset

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def read(self, offset: int, into: torch.Tensor) -> Ticket:
        self.bytes_read += into.numel() * into.element_size()
        return Ticket("", [])

    def write(self, offset: int, source: torch.Tensor) -> Ticket:
        self.bytes_written += source.numel() * source.element_size()
        return Ticket("", [])

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """A tensor of the file's size with whatever the memory held: pages that nobody touches do not exist."""
        yield torch.empty(self._end, dtype=torch.uint8)

    def close(self) -> None:
        """There is nothing to give back."""


def imagined_shelf(folder: Path, nbytes: int, aio: AioSection, where: str) -> ImaginedShelf:
    """In the place of :func:`zero_trial.engine.offload.open_shelf`."""
    return ImaginedShelf()


# The device's copies move nothing that has values, and at once.
IMAGINED = Places(imagined_shelf, lambda device, pinned: PlainMover())
