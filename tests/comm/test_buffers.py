"""Buffers that peers read in place: ordinary tensors where nobody reads in place, and readers that are waited for."""

from __future__ import annotations

import os

import pytest
import torch

from zero_trial.comm import AxisComm, CommCounters
from zero_trial.comm.health import Heartbeat
from zero_trial.comm.shm.lending import BLOCK_BYTES, SharedHandleExchange, SharedTensorPool
from zero_trial.comm.shm.segments import PeerProcesses, SharedMemory, map_file
from zero_trial.errors import MeshError

CPU, META = torch.device("cpu"), torch.device("meta")
READER = 1


def axis(pool: SharedTensorPool | None) -> AxisComm:
    """Rank 0 of two, whose peer is this process."""
    made = AxisComm("shard", (0, 1), 0, None, CommCounters(), Heartbeat(None, 0, 1), 0.05)
    if pool is not None:
        block = os.memfd_create("test")
        os.ftruncate(block, BLOCK_BYTES)
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
    found = pool.lend(made, [READER], PeerProcesses({READER: os.getpid()}))
    assert found is not None and ours.has_readers(made[1:3])
    with pytest.raises(MeshError, match=r"step 0, the readers of a buffer over shard: waited 0\.05 s"):
        ours.wait_for_readers(made)
    segment, _ = found
    segment.window.marks[READER] = segment.generation
    ours.wait_for_readers(made)
    assert not ours.has_readers(made)
