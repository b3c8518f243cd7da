"""Tensors that peers read in place: ordinary to their owner, lent one collective at a time, and gone with all their pages."""

from __future__ import annotations

import copy
import io
import logging
import os
import resource
import subprocess
import sys

import pytest
import torch

from zero_trial.comm.shm import segments
from zero_trial.comm.shm.lending import SharedTensorPool
from zero_trial.comm.shm.segments import HEADER, SMALLEST, PeerProcesses, SegmentHandle, SharedMemory

READER, OTHER = 1, 2


def peers() -> PeerProcesses:
    """Readers that live as long as this test does."""
    return PeerProcesses({READER: os.getpid(), OTHER: os.getpid()})


def held(homes: SharedTensorPool) -> int:
    """Bytes of pages, headers left out."""
    return sum(
        os.fstat(home.segment.descriptor).st_blocks * 512 - HEADER
        for home in homes._tensors.values()
        if os.fstat(home.segment.descriptor).st_blocks
    )


def test_peers_read_what_the_owner_writes() -> None:
    homes, peer = SharedTensorPool(), SharedMemory()
    weights = homes.empty(100, torch.float32)
    assert weights.sum() == 0
    weights.copy_(torch.arange(100.0))
    found = homes.lend(weights[30:], [READER], peers())
    assert found is not None
    segment, offset = found
    ticket = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, offset)
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
    segment, offset = homes.lend(tensor, [READER, OTHER], watched) or pytest.fail("it was free")
    assert home.has_readers
    assert homes.lend(tensor[5:], [READER], watched) is None
    first = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, offset)
    assert homes.lend(tensor, [READER], peers(), again=True) is None, "to others than those who read it now"
    assert homes.lend(tensor[3:], [READER, OTHER], watched, again=True) is not None
    assert homes.lend(tensor[:5], [READER, OTHER], watched, again=True) is None, "more than what is lent"
    second = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, offset)
    for reader in (READER, OTHER):
        peer.acknowledge(first, reader)
    assert home.has_readers, "the second of a chain counts"
    for reader in (READER, OTHER):
        peer.acknowledge(second, reader)
    home.wait_for_readers(0.0)
    assert homes.lend(tensor[5:], [READER], watched) is not None


def test_a_reader_that_does_not_come_and_one_that_has_ended() -> None:
    homes = SharedTensorPool()
    tensor = homes.empty(10, torch.float32)
    home = homes.find(tensor)
    assert home is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        homes.lend(tensor, [READER], PeerProcesses({READER: child.pid}))
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
    segment, offset = homes.lend(tensor, [READER], peers()) or pytest.fail("it was free")
    ticket = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, offset)
    del tensor
    assert homes.empty(SMALLEST, torch.uint8).sum() == 0 and len(homes._tensors) == 2
    assert peer.read(ticket, torch.uint8, 5).tolist() == [3] * 5
    peer.acknowledge(ticket, READER)
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
