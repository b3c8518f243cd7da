"""An axis whose ranks are threads of this process: messages are put into queues. For what runs on
ranks and needs none of their processes."""

from __future__ import annotations

import queue
from typing import Any

import torch

from zero_trial.comm import CommCounters

TIMEOUT_SECONDS = 20.0


class MemoryMessage:
    """A tensor that was put into a queue, or will be taken from one."""

    def __init__(self, source: queue.Queue[Any] | None, values: torch.Tensor) -> None:
        self._source = source
        self.values = values

    @property
    def done(self) -> bool:
        return self._source is None or not self._source.empty()

    def wait(self) -> torch.Tensor:
        if self._source is not None:
            tag, sent = self._source.get(timeout=TIMEOUT_SECONDS)
            if sent.shape != self.values.shape or sent.dtype != self.values.dtype:
                raise AssertionError(f"sent {sent.dtype} {tuple(sent.shape)}, expected {tuple(self.values.shape)}")
            self.values.copy_(sent)
            self.tag, self._source = tag, None
        return self.values


class MemoryAxis:
    """What a pipeline uses of an ``AxisComm``, between threads."""

    name = "pipe"

    def __init__(self, index: int, queues: dict[tuple[int, int], queue.Queue[Any]], size: int) -> None:
        self.index = index
        self.size = size
        self.ranks = tuple(range(size))
        self.counters = CommCounters()
        self._queues = queues

    def send(self, values: torch.Tensor, to: int, label: str, tag: int, *, counted: bool = True) -> MemoryMessage:
        if counted:
            self.counters.add("send", self.name, values.numel(), values.element_size())
        self._queues[self.index, to].put((tag, values.clone()))
        return MemoryMessage(None, values)

    def receive(self, values: torch.Tensor, source: int, label: str, tag: int) -> MemoryMessage:
        return MemoryMessage(self._queues[source, self.index], values)


def axes(size: int) -> list[Any]:
    """The axis as each of ``size`` ranks sees it."""
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    queues: dict[tuple[int, int], queue.Queue[Any]] = {pair: queue.Queue() for pair in pairs}
    return [MemoryAxis(index, queues, size) for index in range(size)]
