"""Segments that ranks of one host share, how many may be mapped, and waits for processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from zero_trial.comm.shm import segments
from zero_trial.comm.shm.segments import (
    SMALLEST,
    USUAL_LIMIT,
    MappingBudget,
    MappingRefused,
    PeerProcesses,
    SegmentHandle,
    SharedMemory,
    SharedTensorPool,
    max_map_count,
)

# --- shared memory ---------------------------------------------------------------------------------------------------


OWNER, READER, OTHER = 0, 1, 2


def ticket_of(segment: object, generation: int, offset: int = 0) -> SegmentHandle:
    return SegmentHandle(os.getpid(), segment.descriptor, generation, offset)  # type: ignore[attr-defined]


def test_a_payload_is_read_where_it_lies() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    segment = memory.acquire(40, [READER])
    segment.payload(torch.float32, 10).copy_(torch.arange(10.0))
    ticket = SegmentHandle.from_tensor(ticket_of(segment, segment.generation).to_tensor())
    assert peer.read(ticket, torch.float32, 10).tolist() == list(range(10))
    assert peer.read(
        SegmentHandle(ticket.process, ticket.descriptor, ticket.generation, 16), torch.float32, 2
    ).tolist() == [
        4,
        5,
    ]


def test_a_segment_is_free_when_all_its_readers_have_read() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    segment = memory.acquire(8, [READER, OTHER])
    ticket = ticket_of(segment, segment.generation)
    assert segment.has_readers
    peer.acknowledge(ticket, READER)
    assert segment.has_readers
    peer.acknowledge(ticket, OTHER)
    assert not segment.has_readers
    assert memory.acquire(8, [READER]) is segment
    assert segment.has_readers  # a new generation: the old acknowledgements do not count


def test_memory_grows_to_what_is_in_flight_and_is_then_reused() -> None:
    memory, peer = SharedMemory(), SharedMemory()
    first, second = memory.acquire(SMALLEST, [READER]), memory.acquire(SMALLEST, [READER])
    assert first is not second
    for segment in (first, second):
        peer.acknowledge(ticket_of(segment, segment.generation), READER)
    assert {id(memory.acquire(SMALLEST, [READER])) for _ in range(2)} == {id(first), id(second)}
    assert len(memory.segments) == 2


def test_a_small_payload_does_not_take_a_large_segment() -> None:
    memory = SharedMemory()
    large = memory.acquire(64 * SMALLEST, [])
    assert not large.has_readers
    assert memory.acquire(SMALLEST, []) is not large


def test_nothing_has_a_name_that_could_be_left_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    memory = SharedMemory()
    memory.acquire(1 << 20, [])
    assert set(Path("/dev/shm").iterdir()) == before


def test_a_process_that_is_gone_is_an_os_error() -> None:
    with pytest.raises(OSError):
        SharedMemory().read(SegmentHandle(2**22 - 1, 3, 1, 0), torch.float32, 1)


# --- mappings --------------------------------------------------------------------------------------------------------


READER_MAPPINGS = 1


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
    tickets = []
    for _ in range(4):
        segment = ours.acquire(SMALLEST, [READER_MAPPINGS])
        tickets.append(SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0))
    assert ours.mappings.count == 4
    for ticket in (*tickets[:3], *tickets[:3]):
        theirs.read(ticket, torch.uint8, 1)
    assert theirs.mappings.count == 3
    with pytest.raises(MappingRefused):
        theirs.read(tickets[3], torch.uint8, 1)
    with pytest.raises(MappingRefused):
        theirs.acquire(SMALLEST, [READER_MAPPINGS])


def test_tensors_that_peers_would_read_in_place_stop_at_half(caplog: pytest.LogCaptureFixture) -> None:
    """Four ranks with two homes each map eight: a third one lies in ordinary memory, which is said once."""
    homes = SharedTensorPool(MappingBudget(limit=16), ranks=4)
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        tensors = [homes.empty(8, torch.float32) for _ in range(4)]
    assert [homes.find(tensor) is not None for tensor in tensors] == [True, True, False, False]
    assert homes.mappings.count == 2
    assert len(caplog.records) == 1
    assert "2 of them, on 4 ranks, are half of vm.max_map_count (16)" in caplog.records[0].message


def test_what_the_system_refuses_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rooms are asked for anew in every step: counted, refusals would end a long run."""
    monkeypatch.setattr(segments, "many_open", lambda descriptor: True)
    homes = SharedTensorPool(MappingBudget(limit=16))
    for _ in range(20):
        assert homes.find(homes.empty(8, torch.float32)) is None
    assert homes.mappings.count == 0


# --- peers -----------------------------------------------------------------------------------------------------------


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


def test_a_killed_process_is_noticed_though_nobody_asked_for_its_status() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = PeerProcesses({1: child.pid})
    os.kill(child.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="closed: the process of axis index 1"):
        peers.wait_for(1, number(), 0, 1, 60.0)
    assert time.monotonic() - begun < 30, "long before the timeout"
    child.communicate()
