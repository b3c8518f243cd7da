"""Segments that ranks of one host share: payloads, tensors that peers read in place, how many may
be mapped, waits for processes."""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import build_mesh
from zero_trial.comm.mesh import MeshShape
from zero_trial.comm.shm import probe, segments
from zero_trial.comm.shm.peers import PeerProcesses
from zero_trial.comm.shm.segments import (
    HEADER,
    SMALLEST,
    USUAL_LIMIT,
    WORTH_A_CALL,
    MappingBudget,
    MappingRefused,
    SegmentHandle,
    SharedMemory,
    SharedTensorPool,
    max_map_count,
)

OWNER, READER, OTHER = 0, 1, 2


def handle_of(segment: object, generation: int, offset: int = 0) -> SegmentHandle:
    return SegmentHandle(os.getpid(), segment.descriptor, generation, offset)  # type: ignore[attr-defined]


def test_a_payload_is_read_where_it_lies() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    segment = memory.acquire(40, [READER])
    segment.payload(torch.float32, 10).copy_(torch.arange(10.0))
    handle = SegmentHandle.from_tensor(handle_of(segment, segment.generation).to_tensor())
    assert peer.read(handle, torch.float32, 10).tolist() == list(range(10))
    assert peer.read(
        SegmentHandle(handle.process, handle.descriptor, handle.generation, 16), torch.float32, 2
    ).tolist() == [
        4,
        5,
    ]


def test_a_segment_is_free_when_all_its_readers_have_read() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    segment = memory.acquire(8, [READER, OTHER])
    handle = handle_of(segment, segment.generation)
    assert segment.has_readers
    peer.acknowledge(handle, READER)
    assert segment.has_readers
    peer.acknowledge(handle, OTHER)
    assert not segment.has_readers
    assert memory.acquire(8, [READER]) is segment
    assert segment.has_readers  # a new generation: the old acknowledgements do not count


def test_memory_grows_to_what_is_in_flight_and_is_then_reused() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    first, second = memory.acquire(SMALLEST, [READER]), memory.acquire(SMALLEST, [READER])
    assert first is not second
    for segment in (first, second):
        peer.acknowledge(handle_of(segment, segment.generation), READER)
    assert {id(memory.acquire(SMALLEST, [READER])) for _ in range(2)} == {id(first), id(second)}
    assert len(memory.segments) == 2


def test_pages_of_payloads_that_all_have_read_go_where_asked() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    segments = [memory.acquire(4 * SMALLEST, [READER]) for _ in range(2)]
    for segment in segments:
        segment.payload(torch.uint8, 4 * SMALLEST).fill_(7)
    peer.acknowledge(handle_of(segments[0], segments[0].generation), READER)
    memory.free_idle()
    pages = [os.fstat(segment.descriptor).st_blocks * 512 for segment in segments]
    assert pages[0] <= HEADER < 4 * SMALLEST <= pages[1]
    assert peer.read(handle_of(segments[1], segments[1].generation), torch.uint8, 3).tolist() == [7, 7, 7]
    memory.owner = -1  # a forked child, whose segments are its parent's
    peer.acknowledge(handle_of(segments[1], segments[1].generation), READER)
    memory.free_idle()
    assert os.fstat(segments[1].descriptor).st_blocks * 512 == pages[1]


def test_a_small_payload_does_not_take_a_large_segment() -> None:
    memory = SharedMemory()
    large = memory.acquire(64 * SMALLEST, [])
    assert not large.has_readers
    assert memory.acquire(SMALLEST, []) is not large


def test_nothing_has_a_name_that_could_be_left_behind() -> None:
    def mapped() -> set[str]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return {line for line in maps if "/" in line}

    before = mapped()
    memory = SharedMemory()
    memory.acquire(1 << 20, [])
    files = {line.split(maxsplit=5)[5].rstrip() for line in mapped() - before}
    assert "/memfd:zero_trial (deleted)" in files
    assert not any(file.startswith(("/dev/shm", tempfile.gettempdir())) for file in files)


def test_a_process_that_is_gone_is_an_os_error() -> None:
    with pytest.raises(OSError):
        SharedMemory().read(SegmentHandle(2**22 - 1, 3, 1, 0), torch.float32, 1)


# --- how many may be mapped -----------------------------------------------------------------------


def test_three_quarters_of_the_limit_are_for_segments() -> None:
    mappings = MappingBudget(limit=8)
    for _ in range(6):
        mappings.take(lambda: None)
    with pytest.raises(MappingRefused, match=r"6 shared segments are mapped, and vm\.max_map_count is 8"):
        mappings.take(lambda: None)
    assert mappings.count == 6


def test_the_limit_is_the_kernels(tmp_path: Path) -> None:
    assert MappingBudget().limit == max_map_count() >= 1024
    file = tmp_path / "max_map_count"
    assert max_map_count(str(file)) == USUAL_LIMIT
    file.write_text("262144\n")
    assert max_map_count(str(file)) == 262144


def test_own_segments_and_those_of_peers_are_counted_once_each() -> None:
    ours, theirs = SharedMemory(), SharedMemory(MappingBudget(limit=4))
    handles = []
    for _ in range(4):
        segment = ours.acquire(SMALLEST, [READER])
        handles.append(SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0))
    assert ours.mappings.count == 4
    for handle in (*handles[:3], *handles[:3]):
        theirs.read(handle, torch.uint8, 1)
    assert theirs.mappings.count == 3
    with pytest.raises(MappingRefused):
        theirs.read(handles[3], torch.uint8, 1)
    with pytest.raises(MappingRefused):
        theirs.acquire(SMALLEST, [READER])


def test_tensors_that_peers_would_read_in_place_stop_at_half(caplog: pytest.LogCaptureFixture) -> None:
    """Four ranks with two pool each map eight: a third one lies in ordinary memory, which is said
    once."""
    pool = SharedTensorPool(MappingBudget(limit=16), ranks=4)
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        tensors = [pool.empty(8, torch.float32) for _ in range(4)]
    assert [pool.find(tensor) is not None for tensor in tensors] == [True, True, False, False]
    assert pool.mappings.count == 2
    assert len(caplog.records) == 1
    assert "2 of them, on 4 ranks, are half of vm.max_map_count (16)" in caplog.records[0].message


def test_what_the_system_refuses_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rooms are asked for again in every step: counted, refusals would end a long run."""
    monkeypatch.setattr(segments, "many_open", lambda descriptor: True)
    pool = SharedTensorPool(MappingBudget(limit=16))
    for _ in range(20):
        assert pool.find(pool.empty(8, torch.float32)) is None
    assert pool.mappings.count == 0


# --- tensors that peers read in place -------------------------------------------------------------


def peers() -> PeerProcesses:
    """Readers that live as long as this test does."""
    return PeerProcesses({READER: os.getpid(), OTHER: os.getpid()})


def lend(
    pool: SharedTensorPool, tensor: torch.Tensor, readers: list[int], watched: PeerProcesses, *, again: bool = False
) -> SegmentHandle | None:
    shared = pool.find(tensor)
    assert shared is not None
    return shared.lend(tensor, tuple(readers), watched, again=again)


def held(pool: SharedTensorPool) -> int:
    """Bytes of pages, headers left out."""
    return sum(
        os.fstat(shared.descriptor).st_blocks * 512 - HEADER
        for shared in pool._tensors.values()
        if os.fstat(shared.descriptor).st_blocks
    )


def test_peers_read_what_the_owner_writes() -> None:
    pool, peer = SharedTensorPool(), SharedMemory()
    weights = pool.empty(100, torch.float32)
    assert weights.sum() == 0
    weights.copy_(torch.arange(100.0))
    handle = lend(pool, weights[30:], [READER], peers())
    assert handle is not None
    assert peer.read(handle, torch.float32, 3, 8).tolist() == [32, 33, 34]


def test_a_tensor_is_found_by_where_it_lies() -> None:
    pool = SharedTensorPool()
    assert pool.find(torch.zeros(3)) is None
    first, second = pool.empty(64, torch.float32), pool.empty(64, torch.bfloat16)
    for tensor in (first, second):
        assert pool.find(tensor[1:7]) is pool.find(tensor) is not None
    assert pool.find(first) is not pool.find(second)
    assert pool.find(torch.zeros(64)) is None
    assert pool.find(first.clone()) is None
    assert pool.empty(0, torch.float32).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_it_is_an_ordinary_tensor_to_its_owner(dtype: torch.dtype) -> None:
    shared = SharedTensorPool().empty(6, dtype)
    shared[2] = 1
    assert shared.untyped_storage().nbytes() == 6 * dtype.itemsize
    twin = copy.deepcopy(shared)
    shared[3] = 1
    assert twin.tolist() == [0, 0, 1, 0, 0, 0]
    written = io.BytesIO()
    torch.save(shared, written)
    assert torch.equal(torch.load(io.BytesIO(written.getvalue())), shared)


def test_a_shared_tensor_is_lent_to_one_collective_at_a_time() -> None:
    pool, peer, watched = SharedTensorPool(), SharedMemory(), peers()
    tensor = pool.empty(10, torch.float32)
    shared = pool.find(tensor)
    assert shared is not None and not shared.has_readers
    first = lend(pool, tensor, [READER, OTHER], watched) or pytest.fail("it was free")
    assert shared.has_readers
    assert lend(pool, tensor[5:], [READER], watched) is None
    assert lend(pool, tensor, [READER], peers(), again=True) is None, "to others than those who read it now"
    second = lend(pool, tensor[3:], [READER, OTHER], watched, again=True)
    assert second is not None
    assert lend(pool, tensor[:5], [READER, OTHER], watched, again=True) is None, "more than what is lent"
    for reader in (READER, OTHER):
        peer.acknowledge(first, reader)
    assert shared.has_readers, "the second of a chain counts"
    for reader in (READER, OTHER):
        peer.acknowledge(second, reader)
    shared.wait_for_readers(0.0)
    assert lend(pool, tensor[5:], [READER], watched) is not None


def test_a_reader_that_does_not_come_and_one_that_has_ended() -> None:
    pool = SharedTensorPool()
    tensor = pool.empty(10, torch.float32)
    shared = pool.find(tensor)
    assert shared is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lend(pool, tensor, [READER], PeerProcesses({READER: child.pid}))
        with pytest.raises(RuntimeError, match="timed out"):
            shared.wait_for_readers(0.01)
    finally:
        child.kill()
    with pytest.raises(RuntimeError, match="closed"):
        shared.wait_for_readers(20.0)
    child.wait()


def test_pages_go_when_the_last_view_goes_and_the_segment_is_used_again() -> None:
    pool = SharedTensorPool()
    for _ in range(20):
        tensor = pool.empty(SMALLEST, torch.float32).fill_(7.0)
        view = tensor.view(2, -1)[1]
        assert held(pool) == pool.taken_bytes == 4 * SMALLEST
        del tensor
        assert held(pool) == 4 * SMALLEST and view[0] == 7.0
        del view
        assert held(pool) == pool.taken_bytes == 0
    assert len(pool._tensors) == 1, "a small one takes the empty segment of a larger one"
    small = pool.empty(10, torch.float32)
    assert small.sum() == 0 and len(pool._tensors) == 1


def test_pages_that_are_kept_stay_for_the_next_tensor_of_that_kind_and_size() -> None:
    pool, peer = SharedTensorPool(), SharedMemory()
    size = 4 * SMALLEST
    tensor = pool.empty(size, torch.uint8, keep=True).fill_(3)
    handle = lend(pool, tensor, [READER], peers()) or pytest.fail("it was free")
    del tensor
    assert (held(pool), pool.taken_bytes) == (size, 0)
    other = pool.empty(size, torch.uint8, keep=True)
    assert len(pool._tensors) == 2, "a peer reads the first"
    pool.free_kept()
    assert held(pool) == 2 * size, "it still does"
    peer.acknowledge(handle, READER)
    assert pool.empty(size // 2, torch.uint8, keep=True).eq(3).all() and len(pool._tensors) == 2
    assert pool.empty(size // 4, torch.uint8, keep=True).sum() == 0 and len(pool._tensors) == 3, "too large"
    assert pool.empty(size, torch.uint8).sum() == 0 and len(pool._tensors) == 4, "zeros"
    pool.free_kept()
    assert held(pool) == pool.taken_bytes == size and other.sum() == 0, "it is in use"


@pytest.mark.parametrize("then", ["another is made", "all are freed"])
def test_pages_that_a_peer_reads_when_their_tensor_goes_go_later(then: str) -> None:
    pool, peer = SharedTensorPool(), SharedMemory()
    tensor = pool.empty(SMALLEST, torch.uint8).fill_(3)
    handle = lend(pool, tensor, [READER], peers()) or pytest.fail("it was free")
    del tensor
    peer.acknowledge(handle, READER)
    assert (held(pool), pool.taken_bytes) == (SMALLEST, 0)
    if then == "another is made":
        other = pool.empty(9 * SMALLEST, torch.uint8)
        assert held(pool) == other.nbytes and len(pool._tensors) == 2, "too large for the first segment"
    else:
        pool.free_kept()
        assert held(pool) == 0


def test_a_reader_that_comes_in_between_leaves_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, peer = SharedTensorPool(), SharedMemory()
    tensor = pool.empty(SMALLEST, torch.uint8).fill_(3)
    handle = lend(pool, tensor, [READER], peers()) or pytest.fail("it was free")
    del tensor
    monkeypatch.setattr(SharedTensorPool, "_vacate_read", lambda _: peer.acknowledge(handle, READER))
    assert pool.empty(SMALLEST, torch.uint8).sum() == 0 and len(pool._tensors) == 1


def test_what_keeps_its_pages_takes_no_segment_of_a_much_larger_one() -> None:
    """It would not be found again: each step made two segments more, with all of their pages."""
    pool = SharedTensorPool()
    for _ in range(5):
        pool.empty(9 * SMALLEST, torch.uint8)
        pool.empty(2 * SMALLEST, torch.uint8, keep=True)
    assert len(pool._tensors) == 2
    assert held(pool) == 2 * SMALLEST


def test_what_peers_still_read_is_kept_after_its_tensor() -> None:
    pool, peer = SharedTensorPool(), SharedMemory()
    tensor = pool.empty(SMALLEST, torch.uint8).fill_(3)
    handle = lend(pool, tensor, [READER], peers()) or pytest.fail("it was free")
    del tensor
    assert pool.empty(SMALLEST, torch.uint8).sum() == 0 and len(pool._tensors) == 2
    assert peer.read(handle, torch.uint8, 5).tolist() == [3] * 5
    peer.acknowledge(handle, READER)
    again = pool.empty(SMALLEST, torch.uint8)
    other = pool.empty(SMALLEST, torch.uint8)
    assert again.sum() == other.sum() == 0 and len(pool._tensors) == 2


def test_a_forked_child_that_drops_a_tensor_leaves_its_parents_pages_alone() -> None:
    pool = SharedTensorPool()
    tensors = [pool.empty(1000, torch.float32).fill_(5.0)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        os._exit(0 if pool.taken_bytes == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensors[0].eq(5.0).all()


def test_without_memory_to_share_tensors_are_ordinary_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = SharedTensorPool()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with caplog.at_level(logging.WARNING, "zero_trial"):
            large = [pool.empty(1 << 20, torch.float32) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(tensor.eq(0).all() and pool.find(tensor) is None for tensor in large)
    assert [record.message for record in caplog.records if "File too large" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    assert pool.find(pool.empty(1 << 20, torch.float32)) is not None


@pytest.mark.parametrize("more", [True, False])
def test_shared_tensors_leave_descriptors_to_others(
    more: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system allows ``more`` of them, there are more; else tensors lie in ordinary
    memory."""
    gaps, highest = [os.open("/dev/null", os.O_RDONLY)], max(map(int, os.listdir("/proc/self/fd")))
    while gaps[-1] < highest:  # that tests before this one have left
        gaps.append(os.open("/dev/null", os.O_RDONLY))
    lowest = gaps[-1] + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * (lowest + 3):
        pytest.skip("this process may have few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * (lowest + 3), hard))
    pool = SharedTensorPool()
    try:
        if not more:
            monkeypatch.setattr(segments, "allow_more", lambda: None)
        with caplog.at_level(logging.WARNING, logger="zero_trial"):
            tensors = [pool.empty(64, torch.float32) for _ in range(20)]
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(lowest)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for descriptor in (*gaps, *others):
        os.close(descriptor)
    found = sum(pool.find(tensor) is not None for tensor in tensors)
    assert found == 20 if more else 1 <= found <= 3
    assert all(torch.equal(tensor, torch.zeros(64)) for tensor in tensors)
    assert sum("open files" in record.message for record in caplog.records) == (0 if more else 1)


# --- processes ------------------------------------------------------------------------------------


def number(value: int = 0) -> memoryview:
    return memoryview(bytearray(value.to_bytes(8, "little"))).cast("q")


def test_what_is_there_is_not_waited_for() -> None:
    PeerProcesses({}).wait_for(3, number(5), 0, 5, 0.0)


def test_returns_when_it_is_there() -> None:
    numbers = number()
    threading.Timer(0.2, numbers.__setitem__, (0, 7)).start()
    PeerProcesses({1: os.getpid()}).wait_for(1, numbers, 0, 7, 30.0)
    assert numbers[0] == 7


def test_gives_up_in_time() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        PeerProcesses({1: os.getpid()}).wait_for(1, number(6), 0, 7, 0.05)


def test_a_killed_process_is_noticed_before_its_status_is_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = PeerProcesses({1: child.pid})
    os.kill(child.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="closed: the process of axis index 1"):
        peers.wait_for(1, number(), 0, 1, 60.0)
    assert time.monotonic() - begun < 30, "long before the timeout"
    child.communicate()


# --- whether memory can be shared -----------------------------------------------------------------


def transports(blind_rank: int | None) -> dict[str, str]:
    """One rank may be made unable to read the others' memory, as if it were in another
    container."""
    world = dist.get_world_size()
    probe._ANSWERS.clear()
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == blind_rank:
        patch.setattr(probe, "_reads", lambda memory, row: False)
    with patch.context():
        mesh = build_mesh(MeshShape(shard=world))
    patch.undo()
    probe._ANSWERS.clear()
    return {"shard": mesh.shard.transport_name, "replica": mesh.replica.transport_name}


def test_ranks_of_one_host_share(ranks: Pools) -> None:
    assert ranks(2).run(transports, None) == [{"shard": "shared memory", "replica": "gloo"}] * 2


def open_after_each_world() -> list[int]:
    """The descriptors of segments and processes that are open after worlds of one process, whose
    ranks have exchanged tensors through copies and in place."""
    found = []
    for _ in range(4):
        for known in (probe._ANSWERS, probe._MEMORIES, probe._TENSORS):
            known.clear()
        mesh = build_mesh(MeshShape(shard=2))
        here = torch.device("cpu")
        for full in (mesh.shard.buffer(1 << 14, torch.float32, here), torch.zeros(1 << 14)):
            own = torch.zeros(1 << 13)
            mesh.shard.reduce_scatter(full, own, "sums").wait()
            mesh.shard.all_gather(full, own, "parts").wait()
        dist.barrier()  # a segment that a peer has still to read stays open
        del mesh, full, own
        gc.collect()
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        found.append(sum("memfd:" in link or "pidfd" in link for link in links))
    return found


def test_a_world_that_has_ended_leaves_no_descriptors(ranks: Pools) -> None:
    for found in ranks(2).run(open_after_each_world):
        assert found[-1] <= found[0] + 2, found  # how many segments are in use at once depends on the peer


def test_one_rank_that_cannot_read_keeps_all_from_sharing(ranks: Pools) -> None:
    assert ranks(2).run(transports, 1) == [{"shard": "gloo", "replica": "gloo"}] * 2


def test_another_number_at_that_place_is_another_host() -> None:
    memory = SharedMemory()
    segment = memory.acquire(8, [])
    segment.payload(torch.int64, 1)[0] = 41
    row = [os.getpid(), segment.descriptor, segment.generation, 0]
    assert probe._reads(memory, [*row, 41])
    assert not probe._reads(memory, [*row, 42])
    assert not probe._reads(memory, [2**22 - 1, 3, 1, 0, 41])


def shared_resident() -> int:
    """Bytes of shared pages in this process's resident memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("numel", [4096, 1 << 20])
def test_what_has_been_read_may_leave_the_resident_memory(numel: int) -> None:
    ours, theirs = SharedMemory(), SharedMemory()
    values = torch.randn(numel)
    segment = ours.acquire(values.nbytes, [READER])
    segment.payload(torch.float32, numel).copy_(values)
    handle = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0)
    before = shared_resident()
    for _ in range(3):
        found = theirs.read(handle, torch.float32, numel)
        assert torch.equal(found, values)
        assert shared_resident() - before >= values.nbytes
        theirs.acknowledge(handle, READER, unmap=True)
        left = shared_resident() - before
        assert left <= HEADER if values.nbytes > WORTH_A_CALL else left >= values.nbytes  # not worth a call
        values += 1  # what the owner writes later is what a later read finds
        segment.payload(torch.float32, numel).copy_(values)
