"""A communicator for each way between two stages."""

from __future__ import annotations

import torch

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh, open_direction_groups
from zero_trial.comm.mesh import directed_pairs


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
    open_direction_groups(build_mesh(MeshShape(pipe=2, shard=2)), [(0, 1)])  # again: nothing is built twice
    return sorted(pipe.directions), groups[0] is not groups[1], found


def test_messages_take_their_own_way(ranks: Pools) -> None:
    for rank, (ways, apart, found) in enumerate(ranks(4).run(both_send_first)):
        assert ways == [(0, 1), (1, 0)]
        assert apart
        other = (rank + 2) % 4
        assert found == [other * 10.0, other * 10.0 + 1]
