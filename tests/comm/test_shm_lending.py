"""Exchange through shared memory: the bits of direct exchange, tensors read in place, handles in order."""

from __future__ import annotations

import copy
import io
import logging
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, build_mesh
from zero_trial.comm.mesh import Mesh, MeshShape
from zero_trial.comm.shm import segments
from zero_trial.comm.shm.segments import (
    HEADER,
    SMALLEST,
    PeerProcesses,
    SegmentHandle,
    SharedMemory,
    SharedTensorPool,
    map_file,
)
from zero_trial.comm.shm.transport import HANDLE_BLOCK_BYTES, HANDLE_SLOTS, SharedHandleExchange
from zero_trial.comm.waits import Heartbeat
from zero_trial.errors import MeshError

# --- shared transport ------------------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(97 * seed + rank)).to(dtype)


# Where a tensor is put before a collective gets it.
Put = Callable[[torch.Tensor], torch.Tensor]


class Places:
    """Puts about two of three tensors into buffers that peers read in place, at any element of them; every rank chooses for itself."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._chance = random.Random(comm.index)
        self._buffers = {dtype: comm.buffer(most + 64, dtype, torch.device("cpu")) for dtype in DTYPES}
        self.used = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._chance.random() < 1 / 3:
            return tensor.clone()
        self.used += 1
        start = self._chance.randrange(64)
        return self._buffers[tensor.dtype][start : start + tensor.numel()].copy_(tensor)


def exchange(mesh: Mesh, numel: int, dtype: torch.dtype, seed: int, put: Put) -> list[torch.Tensor]:
    """A reduction's result, and that of one other collective. Inputs are scribbled over as soon as they are this rank's again."""
    comm = mesh.shard
    own = values(comm.index, numel, dtype, seed)
    out, full = torch.empty(numel // comm.size, dtype=dtype), put(own)
    comm.reduce_scatter(full, out, "grads").wait()
    assert torch.equal(full, own)
    full.fill_(float("nan"))
    whole = put(own)
    if seed % 4 == 0:
        gathered, shard = torch.full((numel,), float("nan"), dtype=dtype), put(out)
        comm.all_gather(gathered, shard, "params").wait()
        shard.fill_(float("nan"))
        return [out, gathered]
    if seed % 4 == 1:
        comm.all_reduce(whole, "all").wait()
    elif seed % 4 == 2:
        comm.broadcast(whole, "told", source=seed % comm.size)
    else:
        part = whole.view(comm.size, -1)[comm.index]
        comm.reduce_scatter(whole, part, "in place").wait()
    result = whole.clone()
    whole.fill_(float("nan"))
    return [out, result]


def compare(count: int) -> int:
    """Random cases on both transports; returns how many tensors were read in place."""
    import torch.distributed as dist

    world = dist.get_world_size()
    shared = build_mesh(MeshShape(shard=world))
    direct = build_mesh(MeshShape(shard=world), shared_memory=False)
    assert (shared.shard.transport, direct.shard.transport) == ("shared memory", "gloo")
    assert shared.shard.reads_in_place(torch.device("cpu")) and not direct.shard.reads_in_place(torch.device("cpu"))
    chance, put = random.Random(5), Places(shared.shard, world * 65536)
    for seed in range(count):
        numel = world * chance.choice([1, 31, 8192, 16384, 65536, chance.randint(1, 40_000)])
        dtype = chance.choice(DTYPES)
        ours = exchange(shared, numel, dtype, seed, put)
        theirs = exchange(direct, numel, dtype, seed, torch.clone)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other), (numel, dtype)
    return put.used


def test_same_bits_as_direct_exchange_wherever_tensors_lie(ranks: Pools) -> None:
    assert min(ranks(2).run(compare, 900)) > 1000
    assert min(ranks(3).run(compare, 80)) > 80
    assert min(ranks(4).run(compare, 20)) > 20


def several_of_one_buffer() -> None:
    """A buffer is lent to one collective; a second one under way copies out its part. Neither start waits for anybody."""
    import torch.distributed as dist

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
    """Rank 1 arrives late: rank 0 has its result, and is told that its buffer is still being read."""

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
    import torch.distributed as dist

    from zero_trial.comm.shm.probe import _MEMORIES

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
    """Rank 1 is killed before it starts an exchange, or when its own part is told and it has not read the others'."""
    import os

    import torch.distributed as dist

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
    from tests.support.pool import RankFailed, RankPool

    before = set(Path("/dev/shm").iterdir())
    pool = RankPool(2)
    try:
        pool.run(die_in_exchange, after_start)
    except RankFailed as failed:
        assert "rank 1 of 2\nthe process died" in str(failed)
        assert "rank 0" not in str(failed).replace("rank 0 of", "")  # rank 0 got its MeshError and returned
    else:
        raise AssertionError("rank 1 was killed")
    finally:
        pool.close()
    assert {p for p in Path("/dev/shm").iterdir() if "zero_trial" in p.name} <= before


# --- buffers ---------------------------------------------------------------------------------------------------------


CPU, META = torch.device("cpu"), torch.device("meta")
READER = 1


def axis(pool: SharedTensorPool | None) -> AxisComm:
    """Rank 0 of two, whose peer is this process."""
    made = AxisComm("shard", (0, 1), 0, None, CommCounters(), Heartbeat(None, 0, 1), 0.05)
    if pool is not None:
        block = os.memfd_create("test")
        os.ftruncate(block, HANDLE_BLOCK_BYTES)
        exchange = SharedHandleExchange(map_file(block), {}, PeerProcesses({READER: os.getpid()}), 0.05)
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
    found = lend(pool, made, [READER], PeerProcesses({READER: os.getpid()}))
    assert found is not None and ours.has_readers(made[1:3])
    with pytest.raises(MeshError, match=r"step 0, the readers of a buffer over shard: waited 0\.05 s"):
        ours.wait_for_readers(made)
    SharedMemory().acknowledge(found, READER)
    ours.wait_for_readers(made)
    assert not ours.has_readers(made)


# --- shared homes ----------------------------------------------------------------------------------------------------


READER_SHARED_HOMES, OTHER = 1, 2


def peers() -> PeerProcesses:
    """Readers that live as long as this test does."""
    return PeerProcesses({READER_SHARED_HOMES: os.getpid(), OTHER: os.getpid()})


def lend(
    homes: SharedTensorPool, tensor: torch.Tensor, readers: list[int], watched: PeerProcesses, *, again: bool = False
) -> SegmentHandle | None:
    home = homes.find(tensor)
    assert home is not None
    return home.lend(tensor, tuple(readers), watched, again=again)


def held(homes: SharedTensorPool) -> int:
    """Bytes of pages, headers left out."""
    return sum(
        os.fstat(home.descriptor).st_blocks * 512 - HEADER
        for home in homes._tensors.values()
        if os.fstat(home.descriptor).st_blocks
    )


def test_peers_read_what_the_owner_writes() -> None:
    homes, peer = SharedTensorPool(), SharedMemory()
    weights = homes.empty(100, torch.float32)
    assert weights.sum() == 0
    weights.copy_(torch.arange(100.0))
    ticket = lend(homes, weights[30:], [READER_SHARED_HOMES], peers())
    assert ticket is not None
    assert peer.read(ticket, torch.float32, 3, 8).tolist() == [32, 33, 34]


def test_a_tensor_is_found_by_where_it_lies() -> None:
    homes = SharedTensorPool()
    assert homes.find(torch.zeros(3)) is None
    first, second = homes.empty(64, torch.float32), homes.empty(64, torch.bfloat16)
    for tensor in (first, second):
        assert homes.find(tensor[1:7]) is homes.find(tensor) is not None
    assert homes.find(first) is not homes.find(second)
    assert homes.find(torch.zeros(64)) is None
    assert homes.find(first.clone()) is None
    assert homes.empty(0, torch.float32).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_it_is_an_ordinary_tensor_to_its_owner(dtype: torch.dtype) -> None:
    home = SharedTensorPool().empty(6, dtype)
    home[2] = 1
    assert home.untyped_storage().nbytes() == 6 * dtype.itemsize
    twin = copy.deepcopy(home)
    home[3] = 1
    assert twin.tolist() == [0, 0, 1, 0, 0, 0]
    written = io.BytesIO()
    torch.save(home, written)
    assert torch.equal(torch.load(io.BytesIO(written.getvalue())), home)


def test_a_home_is_lent_to_one_collective_at_a_time() -> None:
    homes, peer, watched = SharedTensorPool(), SharedMemory(), peers()
    tensor = homes.empty(10, torch.float32)
    home = homes.find(tensor)
    assert home is not None and not home.has_readers
    first = lend(homes, tensor, [READER_SHARED_HOMES, OTHER], watched) or pytest.fail("it was free")
    assert home.has_readers
    assert lend(homes, tensor[5:], [READER_SHARED_HOMES], watched) is None
    assert lend(homes, tensor, [READER_SHARED_HOMES], peers(), again=True) is None, (
        "to others than those who read it now"
    )
    second = lend(homes, tensor[3:], [READER_SHARED_HOMES, OTHER], watched, again=True)
    assert second is not None
    assert lend(homes, tensor[:5], [READER_SHARED_HOMES, OTHER], watched, again=True) is None, "more than what is lent"
    for reader in (READER_SHARED_HOMES, OTHER):
        peer.acknowledge(first, reader)
    assert home.has_readers, "the second of a chain counts"
    for reader in (READER_SHARED_HOMES, OTHER):
        peer.acknowledge(second, reader)
    home.wait_for_readers(0.0)
    assert lend(homes, tensor[5:], [READER_SHARED_HOMES], watched) is not None


def test_a_reader_that_does_not_come_and_one_that_has_ended() -> None:
    homes = SharedTensorPool()
    tensor = homes.empty(10, torch.float32)
    home = homes.find(tensor)
    assert home is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lend(homes, tensor, [READER_SHARED_HOMES], PeerProcesses({READER_SHARED_HOMES: child.pid}))
        with pytest.raises(RuntimeError, match="timed out"):
            home.wait_for_readers(0.01)
    finally:
        child.kill()
    with pytest.raises(RuntimeError, match="closed"):
        home.wait_for_readers(20.0)
    child.wait()


def test_pages_go_when_the_last_view_goes_and_the_segment_is_used_again() -> None:
    homes = SharedTensorPool()
    for _ in range(20):
        tensor = homes.empty(SMALLEST, torch.float32).fill_(7.0)
        view = tensor.view(2, -1)[1]
        assert held(homes) == homes.taken_bytes == 4 * SMALLEST
        del tensor
        assert held(homes) == 4 * SMALLEST and view[0] == 7.0
        del view
        assert held(homes) == homes.taken_bytes == 0
    assert len(homes._tensors) == 1, "a small one takes the empty segment of a larger one"
    small = homes.empty(10, torch.float32)
    assert small.sum() == 0 and len(homes._tensors) == 1


def test_what_peers_still_read_is_kept_after_its_tensor() -> None:
    homes, peer = SharedTensorPool(), SharedMemory()
    tensor = homes.empty(SMALLEST, torch.uint8).fill_(3)
    ticket = lend(homes, tensor, [READER_SHARED_HOMES], peers()) or pytest.fail("it was free")
    del tensor
    assert homes.empty(SMALLEST, torch.uint8).sum() == 0 and len(homes._tensors) == 2
    assert peer.read(ticket, torch.uint8, 5).tolist() == [3] * 5
    peer.acknowledge(ticket, READER_SHARED_HOMES)
    again = homes.empty(SMALLEST, torch.uint8)
    other = homes.empty(SMALLEST, torch.uint8)
    assert again.sum() == other.sum() == 0 and len(homes._tensors) == 2


def test_a_forked_child_that_drops_a_tensor_leaves_its_parents_pages_alone() -> None:
    homes = SharedTensorPool()
    tensors = [homes.empty(1000, torch.float32).fill_(5.0)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        os._exit(0 if homes.taken_bytes == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensors[0].eq(5.0).all()


def test_without_memory_to_share_tensors_are_ordinary_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    homes = SharedTensorPool()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with caplog.at_level(logging.WARNING, "zero_trial"):
            large = [homes.empty(1 << 20, torch.float32) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(tensor.eq(0).all() and homes.find(tensor) is None for tensor in large)
    assert [record.message for record in caplog.records if "File too large" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    assert homes.find(homes.empty(1 << 20, torch.float32)) is not None


@pytest.mark.parametrize("more", [True, False])
def test_homes_leave_descriptors_to_others(
    more: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system allows ``more`` of them, there are more; else tensors lie in ordinary memory."""
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * (lowest + 3):
        pytest.skip("this process may have few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * (lowest + 3), hard))
    homes = SharedTensorPool()
    try:
        if not more:
            monkeypatch.setattr(segments, "allow_more", lambda: None)
        with caplog.at_level(logging.WARNING, logger="zero_trial"):
            tensors = [homes.empty(64, torch.float32) for _ in range(20)]
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(lowest)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for descriptor in others:
        os.close(descriptor)
    found = sum(homes.find(tensor) is not None for tensor in tensors)
    assert found == 20 if more else 1 <= found <= 3
    assert all(torch.equal(tensor, torch.zeros(64)) for tensor in tensors)
    assert sum("open files" in record.message for record in caplog.records) == (0 if more else 1)


# --- shared mail -----------------------------------------------------------------------------------------------------


SHORT, LONG = timedelta(seconds=0.1), timedelta(seconds=30)


def pair(timeout: float = 0.1) -> tuple[SharedHandleExchange, SharedHandleExchange]:
    """Two ends in one process."""
    blocks = [os.memfd_create("test") for _ in range(2)]
    for block in blocks:
        os.ftruncate(block, HANDLE_BLOCK_BYTES)

    def end(own: int, other: int) -> SharedHandleExchange:
        others = {other: map_file(os.dup(blocks[other]))}
        return SharedHandleExchange(map_file(os.dup(blocks[own])), others, PeerProcesses({other: os.getpid()}), timeout)

    return end(0, 1), end(1, 0)


def ticket(number: int) -> SegmentHandle:
    return SegmentHandle(7, 8, number, 16 * number)


def test_each_hears_of_the_others_payload() -> None:
    left, right = pair()
    here, there = left.post(ticket(1), 5, [1]), right.post(ticket(2), 5, [0])
    here.wait(LONG), there.wait(LONG)
    assert (here.handles, there.handles) == ({1: ticket(2)}, {0: ticket(1)})


def test_several_are_under_way_and_are_read_in_any_order() -> None:
    left, right = pair()
    here = [left.post(ticket(k), k, [1]) for k in range(5)]
    there = [right.post(ticket(10 + k), k, [0]) for k in range(5)]
    for k in (3, 0, 4, 1, 2):
        here[k].wait(LONG), there[k].wait(LONG)
        assert (here[k].handles[1], there[k].handles[0]) == (ticket(10 + k), ticket(k))


def test_nobody_is_a_whole_ring_ahead() -> None:
    left, right = pair()
    kept = [left.post(ticket(k), k, []) for k in range(HANDLE_SLOTS)]
    for letters in kept:
        letters.wait(LONG)
    with pytest.raises(RuntimeError, match="timed out"):
        left.post(ticket(HANDLE_SLOTS), HANDLE_SLOTS, [])
    for k in range(HANDLE_SLOTS):
        letters = right.post(None, k, [0])
        letters.wait(LONG)
        assert letters.handles == {0: ticket(k)}


def test_what_nobody_waits_for_holds_nobody_up() -> None:
    left, right = pair()
    for k in range(3 * HANDLE_SLOTS):
        left.post(ticket(k), k, [1])
        right.post(ticket(k), k, [0])


def test_thousands_cross_in_order() -> None:
    left, right = pair(timeout=30.0)
    heard: list[int] = []

    def other() -> None:
        for k in range(3 * HANDLE_SLOTS):
            letters = right.post(ticket(k), k, [0])
            letters.wait(LONG)
            heard.append(letters.handles[0].generation)

    thread = threading.Thread(target=other)
    thread.start()
    for k in range(3 * HANDLE_SLOTS):
        letters = left.post(ticket(-k), k, [1])
        letters.wait(LONG)
        assert letters.handles[1].generation == k
    thread.join()
    assert heard == [-k for k in range(3 * HANDLE_SLOTS)]


def test_another_operation_is_told_apart() -> None:
    left, right = pair()
    here = left.post(ticket(1), 5, [1])
    right.post(ticket(1), 6, [0])
    with pytest.raises(RuntimeError, match="another operation"):
        here.wait(LONG)


def test_one_that_never_comes() -> None:
    left, _ = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        left.post(ticket(1), 5, [1]).wait(SHORT)
