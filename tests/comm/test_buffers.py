"""Tests for zero_trial/comm/shm/lending.py: ordinary tensors where nobody reads in place, and readers that are waited for."""

from __future__ import annotations

import os

import pytest
import torch

from zero_trial.comm.health import Heartbeat, Watchdog
from zero_trial.comm.shm.lending import Buffers, SharedTensorPool
from zero_trial.comm.shm.segments import PeerProcesses
from zero_trial.errors import MeshError

CPU, META = torch.device("cpu"), torch.device("meta")
READER = 1


def buffers(homes: SharedTensorPool | None) -> Buffers:
    made = Buffers("shard", Watchdog(Heartbeat(None, 0, 1), (0, 1), 0.05))
    made.homes = homes
    return made


def test_a_buffer_lives_where_peers_read_it() -> None:
    homes = SharedTensorPool()
    made = buffers(homes).make(5, torch.bfloat16, CPU)
    assert made.tolist() == [0.0] * 5 and made.dtype is torch.bfloat16
    assert homes.find(made) is not None
    assert buffers(homes).make(5, torch.float32, META).device == META


def test_without_shared_memory_it_is_a_tensor_like_any_other() -> None:
    ours = buffers(None)
    made = ours.make(5, torch.float32, CPU)
    made.untyped_storage().resize_(0)
    assert not ours.has_readers(made)
    ours.wait_for_readers(made)


def test_a_reader_that_never_reads_is_an_error() -> None:
    homes = SharedTensorPool()
    ours = buffers(homes)
    made = ours.make(5, torch.float32, CPU)
    assert not ours.has_readers(made)
    found = homes.lend(made, [READER], PeerProcesses({READER: os.getpid()}))
    assert found is not None and ours.has_readers(made[1:3])
    with pytest.raises(MeshError, match=r"step 0, the readers of a buffer over shard: waited 0\.05 s"):
        ours.wait_for_readers(made)
    segment, _ = found
    segment.window.marks[READER] = segment.generation
    ours.wait_for_readers(made)
    assert not ours.has_readers(made)
