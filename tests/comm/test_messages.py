"""Messages between two ranks: through ring buffers in shared memory, or the backend."""

from __future__ import annotations

import mmap
import os
import signal
import time
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, MeshShape, build_mesh, use_ring_channels_if_possible
from zero_trial.comm.shm.ring import INLINE, RING_BYTES, SLOTS, Doorbell, RingBuffer, RingChannels
from zero_trial.comm.shm.segments import SegmentHandle, SharedMemory
from zero_trial.comm.waits import Heartbeat
from zero_trial.errors import MeshError

# --- on an axis -----------------------------------------------------------------------------------


class MessageWork:
    def __init__(self, trouble: str = "") -> None:
        self._trouble = trouble

    def is_completed(self) -> bool:
        return not self._trouble

    def wait(self, timeout: object) -> None:
        if self._trouble:
            raise RuntimeError(self._trouble)


class FakeChannels:
    """Remembers what it was asked for."""

    def __init__(self, work: MessageWork) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._work = work

    def send(self, values: torch.Tensor, to: int, tag: int) -> Any:
        self.asked.append(("send", to, tag))
        return self._work

    def receive(self, values: torch.Tensor, source: int, tag: int) -> Any:
        self.asked.append(("receive", source, tag))
        return self._work


def axis_over(work: MessageWork) -> tuple[AxisComm, FakeChannels]:
    """Axis index 0 of global ranks 4 and 6."""
    axis, channels = AxisComm("pipe", (4, 6), 0, None, CommCounters(), Heartbeat(None, 4, 8), 0.5), FakeChannels(work)
    axis.use_ring_channels(channels)  # type: ignore[arg-type]
    return axis, channels


def test_a_message_through_ring_buffers() -> None:
    messages, channels = axis_over(MessageWork())
    values = torch.arange(3.0)
    message = messages.send(values, 1, "activations", 7)
    assert message.done
    assert message.wait() is values
    assert message.wait() is values  # again
    messages.receive(values, 1, "gradients", 8)
    assert channels.asked == [("send", 1, 7), ("receive", 1, 8)]


def test_a_failure_names_the_two_ranks() -> None:
    messages, _ = axis_over(MessageWork("timed out"))
    message = messages.receive(torch.empty(2), 1, "activations", 7)
    assert not message.done
    with pytest.raises(MeshError, match=r"rank 4, step 0, receive\(activations\) from rank 6: waited 0.5 s for rank 6"):
        message.wait()


# --- ring buffers ---------------------------------------------------------------------------------


SOON = timedelta(seconds=0.2)


def pair(timeout: float = 5.0) -> tuple[RingChannels, RingChannels]:
    """Both ends in this process."""
    memory, bells = SharedMemory(), (Doorbell(), Doorbell())
    one, two = mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES)
    ends = []
    for index, (out, into) in enumerate(((one, two), (two, one))):
        other = 1 - index
        process = os.pidfd_open(os.getpid())
        ends.append(
            RingChannels(
                index,
                memory,
                bells[index],
                {other: RingBuffer(out)},
                {other: RingBuffer(into)},
                {other: os.dup(bells[other].descriptor)},
                {other: process},
                timeout,
            )
        )
    return ends[0], ends[1]


@pytest.mark.parametrize("numel", [0, 1, INLINE // 4, INLINE // 4 + 1, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_message_arrives_whatever_its_size(numel: int, dtype: torch.dtype) -> None:
    sender, reader = pair()
    values = torch.randint(0, 2, (numel,)).to(dtype)
    into = torch.ones(numel).to(dtype)
    receipt = reader.receive(into, 0, tag=7)
    assert not receipt.is_completed()
    sent = sender.send(values, 1, tag=7)
    assert sent.is_completed()
    assert receipt.is_completed()
    expected = values.clone()
    values.zero_()  # the sender may go on with it
    receipt.wait(SOON)
    assert torch.equal(into, expected)


def test_messages_come_in_the_order_of_sending() -> None:
    sender, reader = pair()
    for number in range(5):
        sender.send(torch.full((number + 1,), float(number)), 1, tag=number)
    for number in range(5):
        into = torch.empty(number + 1)
        reader.receive(into, 0, tag=number).wait(SOON)
        assert into.tolist() == [number] * (number + 1)


def test_both_directions_are_apart() -> None:
    first, second = pair()
    first.send(torch.ones(2), 1, tag=1)
    second.send(torch.zeros(3), 0, tag=2)
    into = torch.ones(3)
    first.receive(into, 1, tag=2).wait(SOON)
    assert into.tolist() == [0, 0, 0]


def test_a_ring_is_used_again_once_it_was_read() -> None:
    sender, reader = pair(timeout=0.05)
    value, into = torch.zeros(1), torch.ones(1)
    for _ in range(3):
        for _ in range(SLOTS):
            sender.send(value, 1, tag=0)
        for _ in range(SLOTS):
            reader.receive(into, 0, tag=0).wait(SOON)
    for _ in range(SLOTS):
        sender.send(value, 1, tag=0)
    with pytest.raises(RuntimeError, match="timed out"):
        sender.send(value, 1, tag=0)


def test_another_message_is_not_taken_for_the_one_that_was_asked_for() -> None:
    sender, reader = pair()
    sender.send(torch.ones(2), 1, tag=1)
    with pytest.raises(RuntimeError, match="axis index 0 is at another operation: it has sent another message"):
        reader.receive(torch.ones(2), 0, tag=2).wait(SOON)


def test_waiting_ends_in_time() -> None:
    _, reader = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        reader.receive(torch.ones(1), 0, tag=1).wait(timedelta(seconds=0.01))


def test_a_bell_wakes_at_once_and_once() -> None:
    bell, process = Doorbell(), os.pidfd_open(os.getpid())
    os.write(bell.descriptor, b"\0\0")
    assert not bell.wait(process, 10)
    begin = time.monotonic()
    assert not bell.wait(process, 0.01)
    assert time.monotonic() - begin >= 0.009
    os.close(process)


def _sleep() -> None:
    time.sleep(60)


def test_the_end_of_a_process_is_noticed() -> None:
    child = get_context("fork").Process(target=_sleep)
    child.start()
    process, bell = os.pidfd_open(child.pid or 0), Doorbell()
    os.kill(child.pid or 0, signal.SIGKILL)
    assert bell.wait(process, 10)
    child.join()
    os.close(process)


def test_a_ring_keeps_what_was_written() -> None:
    ring = RingBuffer(mmap.mmap(-1, RING_BYTES))
    ring.write(3, 99, torch.empty(1000, dtype=torch.uint8), SegmentHandle(1, 2, 3, 4))
    assert ring.has(3)
    assert not ring.has(2)
    assert ring.facts(3) == (99, 1000, SegmentHandle(1, 2, 3, 4))
    assert not ring.full(SLOTS)
    assert ring.full(SLOTS + 1)


def exchange(with_channels: bool) -> tuple[bool, list[list[float]], str]:
    """Every rank tells every other one its number, twice; then one that is never sent is waited
    for."""
    mesh = build_mesh(MeshShape(pipe=4), timeout=30.0)
    opened = use_ring_channels_if_possible(mesh.pipe) if with_channels else False
    pipe, found = mesh.pipe, []
    others = [index for index in range(4) if index != pipe.index]
    for turn, numel in enumerate((3, 20_000)):
        sent = [pipe.send(torch.full((numel,), float(pipe.index)), to, "numbers", 1000 + turn) for to in others]
        asked = [pipe.receive(torch.empty(numel), source, "numbers", 1000 + turn) for source in others]
        found.append([message.wait()[-1].item() for message in asked])
        for message in sent:
            message.wait()
    mesh.world.barrier("all are done")
    if not with_channels:
        return opened, found, ""
    pipe.watch.timeout = 0.3
    try:
        pipe.receive(torch.empty(1), others[0], "nothing", 77).wait()
    except MeshError as error:
        return opened, found, str(error)
    return opened, found, "something came"


@pytest.mark.parametrize("with_channels", [True, False])
def test_ranks_exchange_messages(ranks: Pools, with_channels: bool) -> None:
    """Through ring buffers, and through gloo."""
    for rank, (opened, found, text) in enumerate(ranks(4).run(exchange, with_channels)):
        others = [float(other) for other in range(4) if other != rank]
        assert found == [others, others]
        assert opened == with_channels
        if with_channels:
            assert "waited 0.3 s" in text
            assert f"receive(nothing) from rank {int(others[0])}" in text
