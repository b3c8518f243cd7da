"""Copies between a device and the host's memory, at once or on streams beside the device's work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from zero_trial.device import is_accelerator, torch_module


class Copy(Protocol):
    """A copy under way; both tensors must stay until it is waited for."""

    def order(self) -> None:
        """Let work that the device is given afterwards come after the copy. The host does not
        wait."""
        ...

    def wait(self) -> None:
        """Return when the copy is done."""
        ...

    def done(self) -> bool: ...


class _Done:
    """A copy that is over."""

    def order(self) -> None: ...

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


DONE: Copy = _Done()


class HostCopier(Protocol):
    """Starts copies, in the direction that the tensors' places say."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return host memory to copy to and from, (nbytes,) uint8."""
        ...

    def begin(self) -> None:
        """Order the calls of :meth:`copy` that follow after the work that the device has been given
        until now."""
        ...

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        """Copy after the work before :meth:`begin`, and after earlier copies in this direction."""
        ...

    def now(self) -> torch.Event | None:
        """Return the end of the work that the device has been given until now."""
        ...

    def beside(self, source: torch.Tensor, into: torch.Tensor, after: torch.Event | None = None) -> Copy:
        """Copy after the work that the device has been given until ``after`` (None: until now) and
        after all earlier copies, and beside what it is given later, up to :meth:`Copy.order`."""
        ...

    def settle(self) -> None:
        """Return when all copies are done."""
        ...


class BlockingCopier:
    """Copies at once: for a device that is the host, and for dry runs."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self) -> None:
        """Do nothing: no copy is under way."""

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        into.copy_(source)
        return DONE

    def now(self) -> torch.Event | None:
        return None

    def beside(self, source: torch.Tensor, into: torch.Tensor, after: torch.Event | None = None) -> Copy:
        return self.copy(source, into)

    def settle(self) -> None:
        """Do nothing: no copy is under way."""


@dataclass(frozen=True)
class _StreamCopy:
    """A copy that is over at the event ``end``."""

    device: torch.device
    end: torch.Event

    def order(self) -> None:
        torch_module(self.device).current_stream(self.device).wait_event(self.end)

    def wait(self) -> None:
        self.end.synchronize()

    def done(self) -> bool:
        return self.end.query()


class StreamCopier:
    """Copies on a stream for each direction. ``pinned``: the device copies its buffers by itself;
    copies of other buffers block the host."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device = device
        self._pinned = pinned
        self._torch = torch_module(device)
        self._down = self._torch.Stream(device)
        self._up = self._torch.Stream(device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def begin(self) -> None:
        now = self._torch.current_stream(self._device)
        # Down reads gradients that the reductions before have written; up writes shards that
        # gathers before may still read.
        self._down.wait_stream(now)
        self._up.wait_stream(now)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        stream = self._up if is_accelerator(into.device) else self._down
        with self._torch.stream(stream):
            into.copy_(source, non_blocking=True)
        return _StreamCopy(self._device, self._marked(stream))

    def now(self) -> torch.Event | None:
        return self._marked(self._torch.current_stream(self._device))

    def beside(self, source: torch.Tensor, into: torch.Tensor, after: torch.Event | None = None) -> Copy:
        ours, other = (self._up, self._down) if is_accelerator(into.device) else (self._down, self._up)
        ours.wait_event(after if after is not None else self.now())
        ours.wait_stream(other)
        return self.copy(source, into)

    def settle(self) -> None:
        self._up.synchronize()
        self._down.synchronize()

    def _marked(self, stream: torch.Stream) -> torch.Event:
        event: torch.Event = self._torch.Event()
        event.record(stream)
        return event


def copier_for(device: torch.device, pinned: bool) -> HostCopier:
    """Return the copier between ``device`` and the host."""
    return StreamCopier(device, pinned=pinned) if is_accelerator(device) else BlockingCopier()
