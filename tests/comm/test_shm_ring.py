"""Small values and messages through ring buffers in shared memory."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh, use_ring_channels_if_possible
from zero_trial.comm.shm.ring import INLINE, RING_BYTES, SLOTS, Doorbell, RingBuffer, RingChannels
from zero_trial.comm.shm.segments import PeerProcesses, SegmentHandle, SharedMemory, map_file
from zero_trial.comm.shm.transport import CONTROL_BLOCK_BYTES, CONTROL_CAPACITY, SharedControlBlock
from zero_trial.errors import MeshError

# --- shared control --------------------------------------------------------------------------------------------------


def pair() -> tuple[SharedControlBlock, SharedControlBlock]:
    """Two ends in one process."""
    blocks = [os.memfd_create("test") for _ in range(2)]
    for block in blocks:
        os.ftruncate(block, CONTROL_BLOCK_BYTES)

    def end(own: int, other: int) -> SharedControlBlock:
        peers = PeerProcesses({other: os.getpid()})
        return SharedControlBlock(map_file(os.dup(blocks[own])), {other: map_file(os.dup(blocks[other]))}, peers)

    return end(0, 1), end(1, 0)


def test_payloads_cross_many_times_over() -> None:
    left, right = pair()
    heard: list[bytes] = []

    def other() -> None:
        for number in range(500):
            heard.append(right.exchange("sum", number.to_bytes(8, "little"), 10.0)[0])

    thread = threading.Thread(target=other)
    thread.start()
    for number in range(500):
        payload = (1000 + number).to_bytes(8, "little")
        assert left.exchange("sum", payload, 10.0)[1] == number.to_bytes(8, "little")
    thread.join()
    assert heard == [(1000 + number).to_bytes(8, "little") for number in range(500)]


@pytest.mark.parametrize(("name", "payload"), [("barrier", b"12345678"), ("sum", b"1234")])
def test_ranks_that_disagree_are_told(name: str, payload: bytes) -> None:
    left, right = pair()

    def other() -> None:
        with pytest.raises(RuntimeError, match="another operation"):
            right.exchange(name, payload, 10.0)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError, match="another operation"):
        left.exchange("sum", b"12345678", 10.0)
    thread.join()


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    left, _ = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        left.exchange("sum", b"", 0.1)


def small_values() -> list[object]:
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = build_mesh(MeshShape(shard=world))
    comm = mesh.shard
    assert comm._control._shared is not None
    found: list[object] = []
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bfloat16):
        for op in ("sum", "max", "min"):
            values = torch.tensor([[rank + 1.0, -rank], [3.0, rank * rank]]).to(dtype)
            comm.all_reduce_small(values, "few", op)
            found.append(values.tolist())
    sizes = (1, CONTROL_CAPACITY // 8, CONTROL_CAPACITY // 8 + 1, 300_000)
    for size in sizes:
        values = torch.full((size,), float(rank), dtype=torch.float64)
        comm.broadcast(values, "values", source=world - 1)
        found.append(bool((values == world - 1).all()))
        comm.all_reduce_small(values, "all of them")
        found.append(bool((values == world * (world - 1)).all()))
    found.append(comm.gather_json({"rank": rank}, "who"))
    found.append([len(text) for text in comm.gather_json("x" * (1 + rank * CONTROL_CAPACITY), "long")])
    comm.barrier("end")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_verb_on_either_side_of_the_limit(ranks: Pools, world: int) -> None:
    answers = ranks(world).run(small_values)
    assert all(answer == answers[0] for answer in answers)
    total = float(sum(range(1, world + 1)))
    assert answers[0][0] == [[total, -float(sum(range(world)))], [3.0 * world, float(sum(r * r for r in range(world)))]]
    assert all(answers[0][12:20])
    assert answers[0][20] == [{"rank": rank} for rank in range(world)]
    assert answers[0][21] == [1 + rank * CONTROL_CAPACITY for rank in range(world)]


def one_goes_elsewhere() -> str:
    import torch.distributed as dist

    mesh = build_mesh(MeshShape(shard=dist.get_world_size()), timeout=5.0)
    name = "norm" if dist.get_rank() == 0 else "loss"
    try:
        mesh.shard.all_reduce_small(torch.zeros(1), name)
    except MeshError as error:
        return str(error)
    return ""


def test_ranks_at_different_operations_hear_of_it_at_once() -> None:
    pools = Pools()
    try:
        texts = pools(2).run(one_goes_elsewhere)
    finally:
        pools.close()
    assert all("disagree about what comes next" in text or "gave up" in text for text in texts), texts


# --- lanes -----------------------------------------------------------------------------------------------------------


SOON = timedelta(seconds=0.2)


def pair_lanes(timeout: float = 5.0) -> tuple[RingChannels, RingChannels]:
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
    sender, reader = pair_lanes()
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
    sender, reader = pair_lanes()
    for number in range(5):
        sender.send(torch.full((number + 1,), float(number)), 1, tag=number)
    for number in range(5):
        into = torch.empty(number + 1)
        reader.receive(into, 0, tag=number).wait(SOON)
        assert into.tolist() == [number] * (number + 1)


def test_both_directions_are_apart() -> None:
    first, second = pair_lanes()
    first.send(torch.ones(2), 1, tag=1)
    second.send(torch.zeros(3), 0, tag=2)
    into = torch.ones(3)
    first.receive(into, 1, tag=2).wait(SOON)
    assert into.tolist() == [0, 0, 0]


def test_a_ring_is_used_again_once_it_was_read() -> None:
    sender, reader = pair_lanes(timeout=0.05)
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
    sender, reader = pair_lanes()
    sender.send(torch.ones(2), 1, tag=1)
    with pytest.raises(RuntimeError, match="axis index 0 is at another operation: it has sent another message"):
        reader.receive(torch.ones(2), 0, tag=2).wait(SOON)


def test_waiting_ends_in_time() -> None:
    _, reader = pair_lanes()
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


def test_the_end_of_a_process_is_heard() -> None:
    child = get_context("fork").Process(target=_sleep)
    child.start()
    process, bell = os.pidfd_open(child.pid or 0), Doorbell()
    os.kill(child.pid or 0, signal.SIGKILL)
    assert bell.wait(process, 10)
    child.join()
    os.close(process)


def test_a_ring_keeps_what_it_was_told() -> None:
    ring = RingBuffer(mmap.mmap(-1, RING_BYTES))
    ring.write(3, 99, torch.empty(1000, dtype=torch.uint8), SegmentHandle(1, 2, 3, 4))
    assert ring.has(3)
    assert not ring.has(2)
    assert ring.facts(3) == (99, 1000, SegmentHandle(1, 2, 3, 4))
    assert not ring.full(SLOTS)
    assert ring.full(SLOTS + 1)


def exchange(with_lanes: bool) -> tuple[bool, list[list[float]], str]:
    """Every rank tells every other one its number, twice; then one that is never sent is waited for."""
    mesh = build_mesh(MeshShape(pipe=4), timeout=30.0)
    opened = use_ring_channels_if_possible(mesh.pipe) if with_lanes else False
    pipe, found = mesh.pipe, []
    others = [index for index in range(4) if index != pipe.index]
    for turn, numel in enumerate((3, 20_000)):
        sent = [pipe.send(torch.full((numel,), float(pipe.index)), to, "numbers", 1000 + turn) for to in others]
        asked = [pipe.receive(torch.empty(numel), source, "numbers", 1000 + turn) for source in others]
        found.append([message.wait()[-1].item() for message in asked])
        for message in sent:
            message.wait()
    mesh.world.barrier("all are done")
    if not with_lanes:
        return opened, found, ""
    pipe.timeout = 0.3
    try:
        pipe.receive(torch.empty(1), others[0], "nothing", 77).wait()
    except MeshError as error:
        return opened, found, str(error)
    return opened, found, "something came"


@pytest.mark.parametrize("with_lanes", [True, False])
def test_ranks_exchange_messages(ranks: Pools, with_lanes: bool) -> None:
    """Through lanes, and through gloo where there are none."""
    for rank, (opened, found, text) in enumerate(ranks(4).run(exchange, with_lanes)):
        others = [float(other) for other in range(4) if other != rank]
        assert found == [others, others]
        assert opened == with_lanes
        if with_lanes:
            assert "waited 0.3 s" in text
            assert f"receive(nothing) from rank {int(others[0])}" in text
