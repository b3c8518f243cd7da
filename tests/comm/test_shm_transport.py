"""Exchange through shared memory: readers and the reader fence, peers that are killed, handles in
order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools, RankFailed, RankPool
from zero_trial.comm import AxisComm, CommCounters, build_mesh
from zero_trial.comm.mesh import MeshShape
from zero_trial.comm.shm.peers import PeerProcesses
from zero_trial.comm.shm.probe import _MEMORIES
from zero_trial.comm.shm.segments import SegmentHandle, SharedMemory, SharedTensorPool, map_file
from zero_trial.comm.shm.transport import HANDLE_BLOCK_BYTES, HANDLE_SLOTS, SharedHandleExchange
from zero_trial.comm.waits import Heartbeat
from zero_trial.errors import MeshError


def several_of_one_buffer() -> None:
    """A buffer is lent to one collective; a second one under way copies out its part. Neither start
    waits for anybody."""
    comm = build_mesh(MeshShape(shard=dist.get_world_size())).shard
    buffer = comm.buffer(comm.size * 640, torch.float32, torch.device("cpu"))
    buffer.copy_(torch.arange(buffer.numel()))
    outs = [torch.empty(64) for _ in range(10)]
    chunks = buffer.view(10, -1)
    under_way = [comm.reduce_scatter(chunk, out, "part") for chunk, out in zip(chunks, outs, strict=True)]
    for pending in reversed(under_way):
        pending.wait_result()
    comm.wait_for_readers(buffer)
    assert not comm.has_readers(buffer)
    for chunk, out in zip(chunks, outs, strict=True):
        assert torch.equal(out, comm.size * chunk.view(comm.size, -1)[comm.index])


def test_several_collectives_of_one_buffer(ranks: Pools) -> None:
    ranks(2).run(several_of_one_buffer)
    ranks(3).run(several_of_one_buffer)


def lag() -> tuple[bool, bool]:
    """Rank 1 arrives late: rank 0 has its result, and is told that its buffer is still being
    read."""

    mesh = build_mesh(MeshShape(shard=2))
    comm = mesh.shard
    shard = comm.buffer(8, torch.float32, torch.device("cpu")).fill_(float(comm.index))
    full = torch.empty(16)
    pending = comm.all_gather(full, shard, "params")
    if comm.index == 0:
        pending.wait_result()
        early = not comm.has_readers(shard)
        comm.barrier("rank 0 has arrived")
    else:
        early = False
        comm.barrier("rank 0 has arrived")
    pending.wait()
    assert full.tolist() == [0.0] * 8 + [1.0] * 8
    return early, not comm.has_readers(shard)


def test_a_result_is_there_before_peers_have_read(ranks: Pools) -> None:
    assert ranks(2).run(lag) == [(False, True)] * 2


def memory_after(rounds: int) -> int:
    """Segments after ``rounds`` exchanges with two under way at once."""
    mesh = build_mesh(MeshShape(shard=dist.get_world_size()))
    for _ in range(rounds):
        full = [torch.ones(1 << 16) for _ in range(2)]
        out = [torch.empty((1 << 16) // mesh.shard.size) for _ in range(2)]
        under_way = [mesh.shard.reduce_scatter(f, o, "grads") for f, o in zip(full, out, strict=True)]
        for pending in under_way:
            pending.wait_result(keep=True)
            assert all(bool((part == 1).all()) for part in pending.received.values())
            pending.received.release()
        mesh.shard.barrier("everyone has read")
    return sum(s.capacity for s in _MEMORIES[dist.group.WORLD].segments)


def test_memory_stops_growing(ranks: Pools) -> None:
    first = ranks(2).run(memory_after, 3)
    assert ranks(2).run(memory_after, 40) == first


def die_in_exchange(after_start: bool) -> str:
    """Rank 1 is killed before it starts an exchange, or when its own part is told and it has not
    read the others'."""
    mesh = build_mesh(MeshShape(shard=dist.get_world_size()), timeout=20)
    gradients = mesh.shard.buffer(1 << 16, torch.float32, torch.device("cpu"))
    mesh.shard.all_reduce(gradients, "grads").wait()  # so that memory is mapped already
    out = torch.empty(gradients.numel() // mesh.shard.size)
    if dist.get_rank() == 1 and not after_start:
        os.kill(os.getpid(), 9)
    pending = mesh.shard.reduce_scatter(gradients, out, "grads")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    try:
        pending.wait_result()
    except MeshError as error:
        assert not after_start
        return str(error)
    assert after_start
    try:
        pending.wait()
    except MeshError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("after_start", [False, True])
def test_a_killed_peer_is_an_error_and_leaves_nothing_behind(after_start: bool) -> None:
    before = set(Path("/dev/shm").iterdir())
    pool = RankPool(2)
    try:
        pool.run(die_in_exchange, after_start)
    except RankFailed as failed:
        assert "rank 1 of 2\nthe process died" in str(failed)
        # rank 0 got its MeshError and returned
        assert "rank 0" not in str(failed).replace("rank 0 of", "")
    else:
        raise AssertionError("rank 1 was killed")
    finally:
        pool.close()
    assert {p for p in Path("/dev/shm").iterdir() if "zero_trial" in p.name} <= before


# --- buffers --------------------------------------------------------------------------------------


CPU, META = torch.device("cpu"), torch.device("meta")
READER = 1


def axis(pool: SharedTensorPool | None) -> AxisComm:
    """Rank 0 of two, whose peer is this process."""
    made = AxisComm("shard", (0, 1), 0, None, CommCounters(), Heartbeat(None, 0, 1), 0.05)
    if pool is not None:
        block = os.memfd_create("test")
        os.ftruncate(block, HANDLE_BLOCK_BYTES)
        exchange = SharedHandleExchange(map_file(block), {}, PeerProcesses({READER: os.getpid()}), 0.05, print)
        made.share_memory(SharedMemory(), None, exchange, pool)
    return made


def test_a_buffer_lives_where_peers_read_it() -> None:
    pool = SharedTensorPool()
    ours = axis(pool)
    made = ours.buffer(5, torch.bfloat16, CPU)
    assert made.tolist() == [0.0] * 5 and made.dtype is torch.bfloat16
    assert pool.find(made) is not None
    assert ours.reads_in_place(CPU) and not ours.reads_in_place(META)
    assert ours.buffer(5, torch.float32, META).device == META


def test_without_shared_memory_it_is_an_ordinary_tensor() -> None:
    ours = axis(None)
    made = ours.buffer(5, torch.float32, CPU)
    made.untyped_storage().resize_(0)
    assert not ours.reads_in_place(CPU)
    assert not ours.has_readers(made)
    ours.wait_for_readers(made)


def test_a_reader_that_never_reads_is_an_error() -> None:
    pool = SharedTensorPool()
    ours = axis(pool)
    made = ours.buffer(5, torch.float32, CPU)
    assert not ours.has_readers(made)
    home = pool.find(made)
    assert home is not None
    found = home.lend(made, (READER,), PeerProcesses({READER: os.getpid()}))
    assert found is not None and ours.has_readers(made[1:3])
    with pytest.raises(MeshError, match=r"step 0, the readers of a buffer over shard: waited 0\.05 s"):
        ours.wait_for_readers(made)
    SharedMemory().acknowledge(found, READER)
    ours.wait_for_readers(made)
    assert not ours.has_readers(made)


# --- handles --------------------------------------------------------------------------------------


SHORT, LONG = timedelta(seconds=0.1), timedelta(seconds=30)


def pair(
    timeout: float = 0.1, drop: Callable[[SegmentHandle], None] = lambda handle: None
) -> tuple[SharedHandleExchange, SharedHandleExchange]:
    """Two ends in one process."""
    blocks = [os.memfd_create("test") for _ in range(2)]
    for block in blocks:
        os.ftruncate(block, HANDLE_BLOCK_BYTES)

    def end(own: int, other: int) -> SharedHandleExchange:
        others = {other: map_file(os.dup(blocks[other]))}
        peers = PeerProcesses({other: os.getpid()})
        return SharedHandleExchange(map_file(os.dup(blocks[own])), others, peers, timeout, drop)

    return end(0, 1), end(1, 0)


def handle(number: int) -> SegmentHandle:
    return SegmentHandle(7, 8, number, 16 * number)


def test_each_gets_the_others_handle() -> None:
    left, right = pair()
    here, there = left.post(handle(1), 5, [1]), right.post(handle(2), 5, [0])
    here.wait(LONG), there.wait(LONG)
    assert (here.handles, there.handles) == ({1: handle(2)}, {0: handle(1)})


@pytest.mark.parametrize("waits", [False, True])
def test_a_payload_that_will_not_be_read_is_dropped(waits: bool) -> None:
    """So that its owner may write there again, or give the memory back."""
    dropped: list[SegmentHandle] = []
    left, right = pair(drop=dropped.append)
    here, late = left.post(handle(1), 5, [1]), left.post(handle(3), 5, [1])
    right.post(handle(2), 5, [])
    if waits:
        here.wait(LONG)
    del here, late  # the other has not posted the second yet
    assert dropped == [handle(2)]
    memory, peer = SharedMemory(), SharedMemory()
    segment = memory.acquire(8, [READER])
    posted = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0)
    peer.drop(posted, READER)
    assert segment.has_readers, "peers map only what they have read before"
    peer.acknowledge(posted, READER)
    segment.generation += 1
    peer.drop(posted._replace(generation=segment.generation), READER)
    assert not segment.has_readers
    peer.drop(posted, READER)
    assert not segment.has_readers, "an older one must not come after a newer one"


def test_several_are_under_way_and_are_read_in_any_order() -> None:
    left, right = pair()
    here = [left.post(handle(k), k, [1]) for k in range(5)]
    there = [right.post(handle(10 + k), k, [0]) for k in range(5)]
    for k in (3, 0, 4, 1, 2):
        here[k].wait(LONG), there[k].wait(LONG)
        assert (here[k].handles[1], there[k].handles[0]) == (handle(10 + k), handle(k))


def test_no_rank_is_a_whole_ring_ahead() -> None:
    left, right = pair()
    kept = [left.post(handle(k), k, []) for k in range(HANDLE_SLOTS)]
    for posted in kept:
        posted.wait(LONG)
    with pytest.raises(RuntimeError, match="timed out"):
        left.post(handle(HANDLE_SLOTS), HANDLE_SLOTS, [])
    for k in range(HANDLE_SLOTS):
        posted = right.post(None, k, [0])
        posted.wait(LONG)
        assert posted.handles == {0: handle(k)}


def test_an_exchange_without_a_wait_holds_no_rank_up() -> None:
    left, right = pair()
    for k in range(3 * HANDLE_SLOTS):
        left.post(handle(k), k, [1])
        right.post(handle(k), k, [0])


def test_one_that_nobody_waits_for_yet_holds_no_rank_up() -> None:
    """Its handles are read before their places are needed, and are there when it is waited for."""
    left, right = pair()
    kept = [left.post(handle(0), 0, [1]), right.post(handle(-1), 0, [0])]
    for k in range(1, 3 * HANDLE_SLOTS):
        both = [left.post(handle(k), k, [1]), right.post(handle(k), k, [0])]
        for posted in both:
            posted.wait(LONG)
    for posted in kept:
        posted.wait(LONG)
    assert [posted.handles for posted in kept] == [{1: handle(-1)}, {0: handle(0)}]


def test_thousands_cross_in_order() -> None:
    left, right = pair(timeout=30.0)
    received: list[int] = []

    def other() -> None:
        for k in range(3 * HANDLE_SLOTS):
            posted = right.post(handle(k), k, [0])
            posted.wait(LONG)
            received.append(posted.handles[0].generation)

    thread = threading.Thread(target=other)
    thread.start()
    for k in range(3 * HANDLE_SLOTS):
        posted = left.post(handle(-k), k, [1])
        posted.wait(LONG)
        assert posted.handles[1].generation == k
    thread.join()
    assert received == [-k for k in range(3 * HANDLE_SLOTS)]


def test_another_operation_is_recognized() -> None:
    left, right = pair()
    here = left.post(handle(1), 5, [1])
    right.post(handle(1), 6, [0])
    with pytest.raises(RuntimeError, match="another operation"):
        here.wait(LONG)


def test_one_that_never_comes() -> None:
    left, _ = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        left.post(handle(1), 5, [1]).wait(SHORT)
