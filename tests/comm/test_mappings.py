"""Tests for zero_trial/comm/shm/segments.py, with a limit that is small: who is refused, who goes on without, and what is said."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from zero_trial.comm.shm import lending
from zero_trial.comm.shm.lending import SharedTensorPool
from zero_trial.comm.shm.segments import (
    SMALLEST,
    USUAL_LIMIT,
    MappingBudget,
    MappingRefused,
    SegmentHandle,
    SharedMemory,
    max_map_count,
)

READER = 1


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
        segment = ours.acquire(SMALLEST, [READER])
        tickets.append(SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0))
    assert ours.mappings.count == 4
    for ticket in (*tickets[:3], *tickets[:3]):
        theirs.read(ticket, torch.uint8, 1)
    assert theirs.mappings.count == 3
    with pytest.raises(MappingRefused):
        theirs.read(tickets[3], torch.uint8, 1)
    with pytest.raises(MappingRefused):
        theirs.acquire(SMALLEST, [READER])


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
    monkeypatch.setattr(lending, "many_open", lambda descriptor: True)
    homes = SharedTensorPool(MappingBudget(limit=16))
    for _ in range(20):
        assert homes.find(homes.empty(8, torch.float32)) is None
    assert homes.mappings.count == 0
