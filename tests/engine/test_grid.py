"""The questions that DeepSpeed's grid answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zero_trial.comm import MeshShape
from zero_trial.engine.compat import PipelineParallelGrid


def grid(rank: int) -> PipelineParallelGrid:
    """Of a mesh with 3 stages x 2 replicas x 2 shards."""
    shape = MeshShape(pipe=3, replica=2, shard=2)
    at = shape.coordinates(rank)
    group = {name: SimpleNamespace(group=f"{name} group") for name in ("pipe", "model")}
    data: Any = SimpleNamespace(index=at["replica"] * 2 + at["shard"], size=4, group="data group")
    mesh: Any = SimpleNamespace(shape=shape, rank=rank, coordinates=at, data=data, **group)
    return PipelineParallelGrid(mesh)


def test_where_a_rank_is():
    found = grid(6)
    assert (found.get_stage_id(), found.get_pipe_parallel_rank(), found.get_data_parallel_id()) == (1, 1, 2)
    assert (found.pipe_parallel_size, found.data_parallel_size, found.slice_parallel_size, found.world_size) == (
        3,
        4,
        1,
        12,
    )
    assert (found.is_first_stage(), found.is_last_stage(), grid(11).is_last_stage()) == (False, False, True)
    assert (found.get_pipe_parallel_group(), found.get_slice_parallel_group()) == ("pipe group", "model group")


def test_neighbours_in_the_pipeline():
    assert [grid(6).stage_to_global(stage) for stage in range(3)] == [2, 6, 10]
    assert grid(6).stage_to_global(0, data=3) == 3


def test_the_topology_numbers_ranks_as_the_mesh_does():
    for rank in range(12):
        found = grid(rank)
        place = found.topology().get_coord(rank)
        assert (place.pipe, place.data) == (found.stage_id, found.data_parallel_id)
