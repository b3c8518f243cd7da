"""Tests for zero_trial/comm/backends.py: messages by the backend, by ring buffers, and the error that names both ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.comm import AxisComm, CommCounters
from zero_trial.comm.health import Heartbeat
from zero_trial.errors import MeshError


class Work:
    def __init__(self, trouble: str = "") -> None:
        self._trouble = trouble

    def is_completed(self) -> bool:
        return not self._trouble

    def wait(self, timeout: object) -> None:
        if self._trouble:
            raise RuntimeError(self._trouble)


class FakeLanes:
    """Remembers what it was asked for."""

    def __init__(self, work: Work) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._work = work

    def send(self, values: torch.Tensor, to: int, tag: int) -> Any:
        self.asked.append(("send", to, tag))
        return self._work

    def receive(self, values: torch.Tensor, source: int, tag: int) -> Any:
        self.asked.append(("receive", source, tag))
        return self._work


def over(work: Work) -> tuple[AxisComm, FakeLanes]:
    """Axis index 0 of global ranks 4 and 6."""
    axis, lanes = AxisComm("pipe", (4, 6), 0, None, CommCounters(), Heartbeat(None, 4, 8), 0.5), FakeLanes(work)
    axis.use_ring_channels(lanes)  # type: ignore[arg-type]
    return axis, lanes


def test_a_message_through_ring_buffers() -> None:
    messages, lanes = over(Work())
    values = torch.arange(3.0)
    message = messages.send(values, 1, "activations", 7)
    assert message.done
    assert message.wait() is values
    assert message.wait() is values  # again
    messages.receive(values, 1, "gradients", 8)
    assert lanes.asked == [("send", 1, 7), ("receive", 1, 8)]


def test_a_failure_names_the_two_ranks() -> None:
    messages, _ = over(Work("timed out"))
    message = messages.receive(torch.empty(2), 1, "activations", 7)
    assert not message.done
    with pytest.raises(MeshError, match=r"rank 4, step 0, receive\(activations\) from rank 6: waited 0.5 s for rank 6"):
        message.wait()
