"""Stopwatches by name: CUDA events on CUDA (nothing waits until the sums are asked for), the monotonic clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from zero_trial.engine.phases import Phases

# Pairs of events that may wait before those that the device has passed are added up.
_PAIRS_KEPT = 256


class Timers(Phases):
    """Milliseconds per name since the last :meth:`take`, by the host's clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        self._begun[phase] = self._clock()

    def end(self, phase: str) -> None:
        self._sums[phase] = self._sums.get(phase, 0.0) + (self._clock() - self._begun.pop(phase)) * 1e3

    def take(self) -> dict[str, float]:
        """The sums in the order in which the names first came; then they are zero again."""
        sums, self._sums = self._sums, {}
        return sums


class CudaTimers(Timers):
    """The same by events on the current stream: begin and end only enqueue, :meth:`take` waits for the last of them."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._open: dict[str, Any] = {}
        self._pairs: list[tuple[str, Any, Any]] = []

    def begin(self, phase: str) -> None:
        event = self._make_event()
        event.record()
        self._open[phase] = event

    def end(self, phase: str) -> None:
        event = self._make_event()
        event.record()
        self._pairs.append((phase, self._open.pop(phase), event))
        if len(self._pairs) > _PAIRS_KEPT:
            self._add_up(wait=False)

    def take(self) -> dict[str, float]:
        self._add_up(wait=True)
        return super().take()

    def _add_up(self, *, wait: bool) -> None:
        if wait and self._pairs:
            self._pairs[-1][2].synchronize()
        done = 0
        for phase, first, last in self._pairs:
            if not wait and not last.query():
                break
            last.synchronize()
            self._sums[phase] = self._sums.get(phase, 0.0) + first.elapsed_time(last)
            done += 1
        del self._pairs[:done]


def make_timers(device: torch.device) -> Timers:
    """Stopwatches that measure work on ``device``."""
    return CudaTimers() if device.type == "cuda" else Timers()
