"""Tests for zero_trial/comm/mesh.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.comm.mesh import mesh_around
from zero_trial.errors import MeshError


def test_a_process_alone_has_a_mesh_of_ones() -> None:
    mesh = build_mesh(MeshShape())
    assert mesh.rank == 0
    assert mesh.coordinates == {"pipe": 0, "replica": 0, "shard": 0, "model": 0}
    assert [axis.size for axis in (mesh.pipe, mesh.replica, mesh.shard, mesh.model, mesh.data, mesh.world)] == [1] * 6


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(MeshError, match="as many ranks as the world"):
        build_mesh(MeshShape(shard=2))


def lines() -> dict[str, tuple[tuple[int, ...], int, float]]:
    """(ranks, own index, sum of the ranks' numbers) on each axis of a 2 x 2 mesh."""
    mesh = build_mesh(MeshShape(replica=2, shard=2))
    out = {}
    for name in ("pipe", "replica", "shard", "model", "data", "world"):
        axis = getattr(mesh, name)
        number = torch.tensor([float(mesh.rank)])
        axis.all_reduce_small(number, "number")
        out[name] = (axis.ranks, axis.index, number.item())
    return out


def test_every_axis_joins_its_own_ranks(ranks: Pools) -> None:
    everyone = ranks(4).run(lines)
    assert everyone[2] == {
        "pipe": ((2,), 0, 2.0),
        "replica": ((0, 2), 1, 2.0),
        "shard": ((2, 3), 0, 5.0),
        "model": ((2,), 0, 2.0),
        "data": ((0, 1, 2, 3), 2, 6.0),
        "world": ((0, 1, 2, 3), 2, 6.0),
    }
    assert [at["shard"][0] for at in everyone] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def groups_are_reused() -> bool:
    first, second = build_mesh(MeshShape(replica=2, shard=2)), build_mesh(MeshShape(replica=2, shard=2))
    first.shard.barrier("a")
    return (
        first.shard.group is second.shard.group
        and first.world.group is dist.group.WORLD
        and first.heartbeat is second.heartbeat
        and first.counters is not second.counters
        and second.counters.table() == {}
    )


def test_a_second_mesh_shares_groups_and_board_but_not_counters(ranks: Pools) -> None:
    assert ranks(4).run(groups_are_reused) == [True] * 4


def around_a_client_group() -> tuple[Any, ...]:
    """A client with its own model parallelism over 4 ranks: data-parallel groups (0, 2) and (1, 3)."""
    rank = dist.get_rank()
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))}
    own = (0, 2) if rank in (0, 2) else (1, 3)
    mesh = mesh_around(made[own], model_size=2)
    number = torch.tensor([float(rank)])
    mesh.data.all_reduce_small(number, "number")
    return mesh.shape, mesh.shard.ranks, mesh.coordinates["shard"], mesh.world.size, number.item()


def test_a_mesh_around_a_clients_group(ranks: Pools) -> None:
    everyone = ranks(4).run(around_a_client_group)
    shape = MeshShape(shard=2, model=2)
    assert everyone[1] == (shape, (1, 3), 0, 4, 4.0)
    assert everyone[2] == (shape, (0, 2), 1, 4, 2.0)
