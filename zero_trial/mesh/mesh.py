"""The named axes that a rank lives on, with its coordinate, size and communicator on each."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero_trial.errors import MeshError
from zero_trial.mesh.board import Board
from zero_trial.mesh.comm import AxisComm
from zero_trial.mesh.counters import CommCounters
from zero_trial.mesh.sharing import share_if_possible
from zero_trial.mesh.sums import Sum, sum_in_order
from zero_trial.mesh.topology import AXES, MeshShape
from zero_trial.mesh.world import DEFAULT_TIMEOUT_SECONDS, is_distributed, world_board, world_size

# Process groups by (world group, ranks): torch keeps groups for the life of the world, so a second engine must not build them again.
_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()

# Extra communicators that span two axes: `data` for batches and losses, `world` for everything.
_COMBINED = {"data": ("replica", "shard"), "world": AXES}


class Mesh:
    """This rank's place: ``mesh.shard``, ``mesh.replica``, ``mesh.pipe``, ``mesh.model``, and the combined ``mesh.data`` and ``mesh.world``."""

    def __init__(
        self,
        shape: MeshShape,
        rank: int,
        axes: dict[str, AxisComm],
        counters: CommCounters,
        board: Board,
        coordinates: dict[str, int] | None = None,
        model_part: tuple[int, int] | None = None,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinates = coordinates if coordinates is not None else shape.coordinates(rank)
        self.counters = counters
        self.board = board
        self.pipe, self.replica, self.shard, self.model = (axes[name] for name in AXES)
        self.data = axes["data"]
        self.world = axes["world"]
        # Which part of a model that is parallel itself this rank has, of how many: ranks with other parts have other tensors of the same names.
        self.model_part = model_part if model_part is not None else (self.coordinates["model"], shape.model)


def build_mesh(
    shape: MeshShape,
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    shared_memory: bool = True,
    add: Sum = sum_in_order,
) -> Mesh:
    """The mesh of ``shape`` for this rank. Collective over the world the first time that a shape is asked for.

    ``shared_memory``: CPU ranks of one host exchange tensors through memory that they share, where they can. ``add`` makes their sums.

    Raises MeshError when the shape does not have as many ranks as the world.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    if shape.world_size != world:
        raise MeshError(
            "the mesh does not have as many ranks as the world", where="mesh", got=shape, expected=f"{world} ranks"
        )
    counters, board = CommCounters(), world_board()

    def comm(name: str, axes: tuple[str, ...]) -> AxisComm:
        mine, group = _own_group(shape, axes, rank)
        return AxisComm(name, mine, mine.index(rank), group, counters, board, timeout, add)

    axes = {name: comm(name, (name,)) for name in AXES} | {name: comm(name, spans) for name, spans in _COMBINED.items()}
    if shared_memory:
        for axis in axes.values():
            share_if_possible(axis)
    return Mesh(shape, rank, axes, counters, board)


def part_of_pipe(mesh: Mesh, stages: tuple[int, ...], name: str) -> AxisComm | None:
    """A communicator between the pipeline ranks ``stages`` of this rank's pipeline, for what only they share; None on other ranks.

    All ranks of the world must call it alike: torch builds groups together.
    """
    own: AxisComm | None = None
    for line in mesh.shape.groups("pipe"):
        ranks = tuple(line[stage] for stage in stages)
        group = _group(ranks) if len(ranks) > 1 else None
        if mesh.rank in ranks:
            place, pipe = ranks.index(mesh.rank), mesh.pipe
            own = AxisComm(name, ranks, place, group, mesh.counters, mesh.board, pipe.timeout, pipe.add)
    if own is not None:
        share_if_possible(own)
    return own


def mesh_around(
    group: Any,
    *,
    model_size: int = 1,
    model_group: Any = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    add: Sum = sum_in_order,
) -> Mesh:
    """A mesh around a client's data-parallel group (an ``mpu`` with get_data_parallel_group): its ranks lie on the shard axis.

    ``model_group`` (get_model_parallel_group) makes the model axis; without it that stays the client's business, and ``model_size`` only enters
    the shape, so that batch arithmetic is right. Each data-parallel group of the client is taken for a part of the model of its own. Collective
    over the world.
    """
    rank, world = (dist.get_rank(), world_size()) if is_distributed() else (0, 1)
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,)
    counters, board = CommCounters(), world_board()

    def comm(name: str, among: tuple[int, ...], own: Any) -> AxisComm:
        return AxisComm(name, among, among.index(rank), own, counters, board, timeout, add)

    axes = {name: comm(name, (rank,), None) for name in AXES}
    axes |= {"shard": comm("shard", ranks, group), "data": comm("data", ranks, group)}
    if model_group is not None:
        axes["model"] = comm("model", tuple(dist.get_process_group_ranks(model_group)), model_group)
    axes["world"] = comm("world", tuple(range(world)), dist.group.WORLD if world > 1 else None)
    shape = MeshShape(shard=len(ranks), model=model_size)
    coordinates = dict.fromkeys(AXES, 0) | {"shard": ranks.index(rank)}
    groups = sorted(
        {tuple(found) for found in axes["world"].gather_json(list(ranks), "data-parallel groups of the mpu")}
    )
    return Mesh(shape, rank, axes, counters, board, coordinates, (groups.index(ranks), len(groups)))


def _own_group(shape: MeshShape, axes: tuple[str, ...], rank: int) -> tuple[tuple[int, ...], Any]:
    """The ranks and the process group of this rank's line along ``axes``; all ranks build all groups, in the same order."""
    mine: tuple[int, ...] = (rank,)
    own: Any = None
    for ranks in shape.groups(*axes):
        group = _group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine, own = ranks, group
    return mine, own


def _group(ranks: tuple[int, ...]) -> Any:
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    known = _GROUPS.setdefault(world, {})
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks))
    return known[ranks]
