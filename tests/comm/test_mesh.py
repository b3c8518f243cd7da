"""Which rank is where, groups that are made once, and a communicator for each direction."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool import Pools
from zero_trial.comm import build_mesh, open_direction_groups
from zero_trial.comm.mesh import AXES, MeshShape, directed_pairs, mesh_around
from zero_trial.errors import MeshError

shapes = st.builds(MeshShape, *(st.integers(1, 4) for _ in AXES))


@given(shapes)
def test_ranks_have_coordinates_in_the_order_of_the_axes(shape: MeshShape) -> None:
    seen = [shape.coordinates(rank) for rank in range(shape.world_size)]
    expected = itertools.product(*map(range, shape.sizes))
    assert [tuple(at[name] for name in AXES) for at in seen] == list(expected)


@given(shapes, st.sets(st.sampled_from(AXES)))
def test_groups_are_a_partition_whose_ranks_differ_on_the_axes_alone(shape: MeshShape, axes: set[str]) -> None:
    groups = shape.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        others = {tuple(v for k, v in shape.coordinates(rank).items() if k not in axes) for rank in group}
        assert len(others) == 1


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
    """A client with its own model parallelism over 4 ranks: data-parallel groups (0, 2) and (1,
    3)."""
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
    assert everyone[1] == (shape, (1, 3), 0, 4, 4.0) and everyone[2] == (shape, (0, 2), 1, 4, 2.0)


def test_every_pipeline_has_its_own() -> None:
    shape = MeshShape(pipe=3, shard=2)
    assert directed_pairs(shape, [(0, 1), (2, 1)]) == [(0, 2), (4, 2), (1, 3), (5, 3)]


def both_send_first() -> tuple[list[tuple[int, int]], bool, list[float]]:
    """Neighbours of 2 x 2 ranks each send two messages before they receive."""
    mesh = build_mesh(MeshShape(pipe=2, shard=2))
    open_direction_groups(mesh, [(0, 1), (1, 0)])
    pipe, other = mesh.pipe, 1 - mesh.pipe.index
    sent = [pipe.send(torch.full((9,), float(mesh.rank * 10 + turn)), other, "m", 500 + turn) for turn in range(2)]
    found = [pipe.receive(torch.empty(9), other, "m", 500 + turn).wait()[0].item() for turn in range(2)]
    for message in sent:
        message.wait()
    groups = list(pipe.directions.values())
    # again: nothing is built twice
    open_direction_groups(build_mesh(MeshShape(pipe=2, shard=2)), [(0, 1)])
    return sorted(pipe.directions), groups[0] is not groups[1], found


def test_messages_take_their_own_way(ranks: Pools) -> None:
    for rank, (ways, apart, found) in enumerate(ranks(4).run(both_send_first)):
        assert ways == [(0, 1), (1, 0)] and apart
        other = (rank + 2) % 4
        assert found == [other * 10.0, other * 10.0 + 1]
