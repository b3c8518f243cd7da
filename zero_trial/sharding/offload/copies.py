"""Copies between a device and the host's memory, next to the device's other work."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_trial.device import is_accelerator, torch_module


@dataclass(frozen=True)
class Copy:
    """A copy that is complete at the event ``end``; both tensors must stay alive until then."""

    device: torch.device
    end: torch.Event

    def order(self) -> None:
        """Make the device's later work run after the copy. The host does not wait."""
        torch_module(self.device).current_stream(self.device).wait_event(self.end)

    def wait(self) -> None:
        """Return when the copy is done."""
        self.end.synchronize()

    def done(self) -> bool:
        return self.end.query()


class Copier:
    """Copies on one stream per direction. ``pinned``: host buffers are page-locked, so copies do
    not block the host; copies of other buffers do."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device = device
        self._pinned = pinned
        self._torch = torch_module(device)
        self._down = self._torch.Stream(device)
        self._up = self._torch.Stream(device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return host memory to copy to and from, (nbytes,) uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def now(self) -> torch.Event:
        """Return the event at the end of the work submitted to the device until now."""
        return self._marked(self._torch.current_stream(self._device))

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: torch.Event | None = None) -> Copy:
        """Copy after the work submitted to the device until ``after`` (None: until now) and after
        earlier copies in this direction, in parallel to work submitted later, up to
        :meth:`Copy.order`."""
        stream = self._up if is_accelerator(into.device) else self._down
        stream.wait_event(after if after is not None else self.now())
        with self._torch.stream(stream):
            into.copy_(source, non_blocking=True)
        return Copy(self._device, self._marked(stream))

    def settle(self) -> None:
        """Return when all copies are done."""
        self._up.synchronize()
        self._down.synchronize()

    def _marked(self, stream: torch.Stream) -> torch.Event:
        event: torch.Event = self._torch.Event()
        event.record(stream)
        return event
