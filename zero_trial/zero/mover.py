"""Copies between the device that computes and the host's memory, beside what the device is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# Waits on the host until the copy is done.
Wait = Callable[[], None]


class Mover(Protocol):
    """One direction each way. ``down`` and ``up`` start a copy and return what waits for it; tensors of both sides must stay until then."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory to copy to and from, (nbytes,) uint8."""
        ...

    def begin(self) -> None:
        """Copies that are started from now on see what the device has been given to do until now."""
        ...

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        """From the device to the host."""
        ...

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        """From the host to the device. What the device is given to do afterwards sees the result."""
        ...


class PlainMover:
    """Copies at once: for a device that is the host, and for rehearsals."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self) -> None:
        """Nothing is under way."""

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        into.copy_(source)
        return _nothing

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        into.copy_(source)
        return _nothing


class CudaMover:
    """A stream for each direction. ``pinned``: buffers that the device copies by itself; from others every copy holds the host up."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device = device
        self._pinned = pinned
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def begin(self) -> None:
        now = torch.cuda.current_stream(self._device)
        # Down reads gradients that the reductions before have written; up writes shards that gathers before may still read.
        self._down.wait_stream(now)
        self._up.wait_stream(now)

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        return self._copy(source, into, self._down).synchronize

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        done = self._copy(source, into, self._up)
        torch.cuda.current_stream(self._device).wait_event(done)  # the gather of the new values is given to this stream
        return done.synchronize

    def _copy(self, source: torch.Tensor, into: torch.Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done


def mover_for(device: torch.device, pinned: bool) -> Mover:
    """The way between ``device`` and the host."""
    return CudaMover(device, pinned=pinned) if device.type == "cuda" else PlainMover()


def _nothing() -> None:
    return None
