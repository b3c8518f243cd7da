"""Whether memory can be shared is tried, and all ranks agree about it."""

from __future__ import annotations

import pytest

from tests.support.pool import Pools
from zero_trial.comm import build_mesh
from zero_trial.comm.mesh import MeshShape
from zero_trial.comm.shm import probe
from zero_trial.comm.shm.segments import SharedMemory


def transports(blind_rank: int | None) -> dict[str, str]:
    """One rank may be made unable to read the others' memory, as if it were in another container."""
    import torch.distributed as dist

    world = dist.get_world_size()
    probe._ANSWERS.clear()
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == blind_rank:
        patch.setattr(probe, "_reads", lambda memory, row: False)
    with patch.context():
        mesh = build_mesh(MeshShape(shard=world))
    patch.undo()
    probe._ANSWERS.clear()
    return {"shard": mesh.shard.transport, "replica": mesh.replica.transport}


def test_ranks_of_one_host_share(ranks: Pools) -> None:
    assert ranks(2).run(transports, None) == [{"shard": "shared memory", "replica": "gloo"}] * 2


def test_one_rank_that_cannot_read_is_enough_for_nobody_to_share(ranks: Pools) -> None:
    assert ranks(2).run(transports, 1) == [{"shard": "gloo", "replica": "gloo"}] * 2


def test_another_number_at_that_place_is_another_host() -> None:
    import os

    import torch

    memory = SharedMemory()
    segment = memory.acquire(8, [])
    segment.payload(torch.int64, 1)[0] = 41
    row = [os.getpid(), segment.descriptor, segment.generation, 0]
    assert probe._reads(memory, [*row, 41])
    assert not probe._reads(memory, [*row, 42])
    assert not probe._reads(memory, [2**22 - 1, 3, 1, 0, 41])
