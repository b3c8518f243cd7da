"""Directions: a communicator for each way that messages go between two ranks, for backends that keep one order for everything on a communicator.

NCCL runs what is enqueued on a communicator one after the other. Two ranks that each send before they receive would wait for each other for
ever on one that they share; with one for each direction there are only sends on one end and receives on the other, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero_trial.mesh.mesh import Mesh
from zero_trial.mesh.topology import MeshShape

# Groups by (world group, from rank, to rank): torch keeps groups for the life of the world.
_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, int], Any]] = WeakKeyDictionary()


def directed_pairs(shape: MeshShape, hops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(from rank, to rank) for each hop between two pipeline stages, in every pipeline of the mesh. Pure; the same on all ranks."""
    return [(line[source], line[target]) for line in shape.groups("pipe") for source, target in hops]


def open_directions(mesh: Mesh, hops: Sequence[tuple[int, int]]) -> None:
    """Lets messages along ``mesh.pipe`` for each of ``hops`` (from stage, to stage) have a communicator of their own.

    Collective over the world: all ranks must name the same hops. A communicator that is not used costs nothing but its name.
    """
    world = dist.group.WORLD
    known = _GROUPS.setdefault(world, {})
    stage_of = {rank: stage for stage, rank in enumerate(mesh.pipe.ranks)}
    for pair in directed_pairs(mesh.shape, hops):
        if pair not in known:
            known[pair] = dist.new_group(sorted(pair))
        if all(rank in stage_of for rank in pair):
            mesh.pipe.directions[stage_of[pair[0]], stage_of[pair[1]]] = known[pair]
