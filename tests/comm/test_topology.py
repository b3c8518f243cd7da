"""Tests for zero_trial/comm/mesh.py."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_trial.comm.mesh import AXES, MeshShape, plan_shape
from zero_trial.errors import ConfigError


def test_neighbouring_ranks_differ_in_the_innermost_axis() -> None:
    shape = MeshShape(pipe=2, replica=2, shard=2)
    assert shape.coordinates(5) == {"pipe": 1, "replica": 0, "shard": 1, "model": 0}
    assert shape.groups("shard") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert shape.groups("replica") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert shape.groups("pipe") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert shape.groups("replica", "shard") == [(0, 1, 2, 3), (4, 5, 6, 7)]


shapes = st.builds(MeshShape, *(st.integers(1, 4) for _ in AXES))


@given(shapes)
def test_coordinates_and_ranks_are_each_others_inverse(shape: MeshShape) -> None:
    seen = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert [shape.rank_at(**at) for at in seen] == list(range(shape.world_size))
    for at in seen:
        assert all(0 <= at[name] < size for name, size in zip(AXES, shape.sizes, strict=True))


@given(shapes, st.sets(st.sampled_from(AXES)))
def test_groups_are_a_partition_whose_ranks_differ_on_the_axes_alone(shape: MeshShape, axes: set[str]) -> None:
    groups = shape.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        others = {tuple(v for k, v in shape.coordinates(rank).items() if k not in axes) for rank in group}
        assert len(others) == 1


def test_data_parallel_size_is_replica_times_shard() -> None:
    assert MeshShape(pipe=2, replica=3, shard=4, model=5).data_parallel_size == 12
    assert MeshShape(pipe=2, replica=3, shard=4, model=5).world_size == 120


PLANS: list[tuple[int, dict[str, Any], MeshShape]] = [
    (1, {"shard_optimizer": False}, MeshShape()),
    (4, {"shard_optimizer": False}, MeshShape(replica=4)),
    (4, {"shard_optimizer": False, "shard": 1}, MeshShape(replica=4)),
    (4, {"shard_optimizer": False, "replica": 4}, MeshShape(replica=4)),
    (4, {"shard_optimizer": True}, MeshShape(shard=4)),
    (4, {"shard_optimizer": True, "shard": 2}, MeshShape(replica=2, shard=2)),
    (4, {"shard_optimizer": True, "replica": 4}, MeshShape(replica=4, shard=1)),
    (8, {"shard_optimizer": True, "shard": 4, "replica": 2}, MeshShape(replica=2, shard=4)),
    (8, {"shard_optimizer": True, "pipe": 2}, MeshShape(pipe=2, shard=4)),
    (8, {"shard_optimizer": True, "pipe": 2, "model": 2, "shard": 1}, MeshShape(2, 2, 1, 2)),
]


@pytest.mark.parametrize(("world", "wanted", "shape"), PLANS)
def test_plan_shape(world: int, wanted: dict[str, Any], shape: MeshShape) -> None:
    assert plan_shape(world, **wanted) == shape
    assert shape.world_size == world


IMPOSSIBLE: list[tuple[int, dict[str, Any], str]] = [
    (4, {"shard_optimizer": True, "shard": 3}, "mesh.shard"),
    (4, {"shard_optimizer": True, "shard": 0}, "mesh.shard"),
    (4, {"shard_optimizer": True, "shard": -2}, "mesh.shard"),
    (4, {"shard_optimizer": True, "shard": 8}, "mesh.shard"),
    (4, {"shard_optimizer": True, "replica": 3}, "mesh.shard"),
    (4, {"shard_optimizer": True, "replica": 0}, "mesh.shard"),
    (4, {"shard_optimizer": True, "replica": -1}, "mesh.shard"),
    (4, {"shard_optimizer": True, "shard": 4, "replica": 2}, "mesh.shard"),
    (4, {"shard_optimizer": False, "shard": 2}, "mesh.shard"),
    (4, {"shard_optimizer": False, "replica": 2}, "mesh.replica"),
    (4, {"shard_optimizer": True, "pipe": 3}, "mesh"),
    (4, {"shard_optimizer": True, "pipe": 0}, "mesh"),
    (4, {"shard_optimizer": True, "model": 8}, "mesh"),
]


@pytest.mark.parametrize(("world", "wanted", "where"), IMPOSSIBLE)
def test_a_mesh_that_does_not_fit_is_refused(world: int, wanted: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_shape(world, **wanted)
    assert raised.value.where == where


def test_the_error_lists_what_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"1 x 6, 2 x 3, 3 x 2, 6 x 1"):
        plan_shape(6, shard_optimizer=True, shard=4)
