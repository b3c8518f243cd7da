"""Messages between two ranks, as pipeline stages send them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, MeshShape, build_mesh
from zero_trial.comm.waits import Heartbeat
from zero_trial.errors import MeshError


class MessageWork:
    def __init__(self, trouble: str = "") -> None:
        self._trouble = trouble

    def is_completed(self) -> bool:
        return not self._trouble

    def wait(self, timeout: object) -> None:
        if self._trouble:
            raise RuntimeError(self._trouble)


def axis_over(work: MessageWork, monkeypatch: pytest.MonkeyPatch) -> AxisComm:
    """Axis index 0 of global ranks 4 and 6, whose messages are all ``work``."""
    monkeypatch.setattr(dist, "isend", lambda *_, **__: work)
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: work)
    return AxisComm("pipe", (4, 6), 0, None, CommCounters(), Heartbeat(None, 4, 8), 0.5)


def test_a_message_can_be_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(3.0)
    message = axis_over(MessageWork(), monkeypatch).send(values, 1, "activations", 7)
    assert message.done
    assert message.wait() is values
    assert message.wait() is values


def test_a_failure_names_the_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = axis_over(MessageWork("timed out"), monkeypatch).receive(torch.empty(2), 1, "activations", 7)
    assert not message.done
    with pytest.raises(MeshError, match=r"rank 4, step 0, receive\(activations\) from rank 6: waited 0.5 s for rank 6"):
        message.wait()


def exchange() -> list[list[float]]:
    """Every rank sends its number to every other one, twice."""
    mesh = build_mesh(MeshShape(pipe=4), timeout=30.0)
    pipe, found = mesh.pipe, []
    others = [index for index in range(4) if index != pipe.index]
    for turn, numel in enumerate((3, 20_000)):
        sent = [pipe.send(torch.full((numel,), float(pipe.index)), to, "numbers", 1000 + turn) for to in others]
        asked = [pipe.receive(torch.empty(numel), source, "numbers", 1000 + turn) for source in others]
        found.append([message.wait()[-1].item() for message in asked])
        for message in sent:
            message.wait()
    return found


def test_ranks_exchange_messages(ranks: Pools) -> None:
    for rank, found in enumerate(ranks(4).run(exchange)):
        others = [float(other) for other in range(4) if other != rank]
        assert found == [others, others]
