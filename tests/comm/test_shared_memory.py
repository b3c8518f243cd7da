"""Segments of one process, read through a second mapping as a peer would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from zero_trial.comm.shm.segments import SMALLEST, SegmentHandle, SharedMemory

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
    assert not segment.free
    peer.acknowledge(ticket, READER)
    assert not segment.free
    peer.acknowledge(ticket, OTHER)
    assert segment.free
    assert memory.acquire(8, [READER]) is segment
    assert not segment.free  # a new generation: the old acknowledgements do not count


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
    assert large.free
    assert memory.acquire(SMALLEST, []) is not large


def test_nothing_has_a_name_that_could_be_left_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    memory = SharedMemory()
    memory.acquire(1 << 20, [])
    assert set(Path("/dev/shm").iterdir()) == before


def test_a_process_that_is_gone_is_an_os_error() -> None:
    with pytest.raises(OSError):
        SharedMemory().read(SegmentHandle(2**22 - 1, 3, 1, 0), torch.float32, 1)
