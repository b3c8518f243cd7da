"""Small sums and gathers of a few numbers, in shared memory and by the backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import Mesh, MeshShape, build_mesh


def line(shared: bool = True) -> Mesh:
    """All ranks of the pool on the shard axis."""
    return build_mesh(MeshShape(shard=dist.get_world_size()), shared_memory=shared)


def json_values(shared: bool) -> None:
    mesh = line(shared)
    mine = {"rank": mesh.rank, "text": "ä\n" * mesh.rank, "list": [None, 1.5, True]}
    everyone = mesh.shard.gather_json(mine, "facts")
    assert [value["rank"] for value in everyone] == list(range(mesh.shard.size))
    assert everyone[mesh.rank] == mine
    assert everyone[-1]["text"] == "ä\n" * (mesh.shard.size - 1)
    assert mesh.shard.gather_json(None, "nothing") == [None] * mesh.shard.size


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_gather_json(ranks: Pools, world: int, shared: bool) -> None:
    ranks(world).run(json_values, shared)


def small_numbers(shared: bool) -> None:
    shard = line(shared).shard
    for op, expected in (("sum", sum(range(shard.size))), ("max", shard.size - 1), ("min", 0)):
        value = torch.tensor([float(shard.index)], dtype=torch.float64)
        shard.all_reduce_small(value, "norm", op)
        assert value.item() == expected
    bad = torch.tensor([float("nan") if shard.index == 1 else 1.0])
    shard.all_reduce_small(bad, "norm")
    assert bad.isnan().all()


@pytest.mark.parametrize("shared", [True, False])
def test_small_reductions(ranks: Pools, shared: bool) -> None:
    ranks(3).run(small_numbers, shared)
