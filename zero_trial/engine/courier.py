"""Brings a few numbers from where gradients are to the host, while the device goes on: they leave at once and are read later."""

from __future__ import annotations

from typing import Any

import torch


class Courier:
    """``there`` (n,) fp32 lives on ``device``; what it holds when :meth:`send` is called is what :meth:`receive` returns.

    On CUDA the copy goes to pinned memory in the order of the current stream, and an event marks its end. Nothing may write into ``there``
    between the two on another stream, and a second :meth:`send` overwrites the first.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        on_cuda = device.type == "cuda"
        self.there = torch.zeros(numel, device=device)
        self._here = torch.zeros(numel, pin_memory=on_cuda)
        self._arrived: Any = torch.cuda.Event() if on_cuda else None
        self.received = 0  # how often somebody has waited

    def send(self) -> None:
        """Does not wait."""
        self._here.copy_(self.there, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def receive(self) -> torch.Tensor:
        """On the host, (n,). Waits until the device has come as far as the last :meth:`send`, and no further."""
        self.received += 1
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here
