"""The mesh: named axes of ranks, with this rank's coordinate, size and communicator on each.

The axes, outermost first, are ``pipe``, ``replica``, ``shard``, ``model``: neighboring ranks
differ in the innermost axis, so that the axes with the most traffic per step stay on one host.

    MeshShape               which rank has which coordinates, and which ranks form a group; pure
    Mesh, build_mesh        the communicators, over process groups that are made once per world
    mesh_around             the same over the process groups of a client's ``mpu``
    open_direction_groups   a communicator for each way between two pipeline stages
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from mmap import mmap
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from zero_trial.comm.backends import CallBoard, CommCounters, SharedTransport, Sum, sum_in_order
from zero_trial.comm.collective import AxisComm
from zero_trial.comm.rendezvous import DEFAULT_TIMEOUT_SECONDS, is_distributed, world_heartbeat, world_size
from zero_trial.comm.shared_memory import Arena, PeerProcesses, map_peer, why_not_shared
from zero_trial.comm.waits import Heartbeat, UnderWay
from zero_trial.errors import MeshError

log = logging.getLogger("zero_trial")

AXES = ("pipe", "replica", "shard", "model")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the four axes; their product is the number of ranks."""

    pipe: int = 1
    replica: int = 1
    shard: int = 1
    model: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.pipe, self.replica, self.shard, self.model)

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def data_parallel_size(self) -> int:
        """Return how many ranks see different data: replica x shard."""
        return self.replica * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return ``rank`` as one index per axis (mixed radix, ``model`` fastest)."""
        out: dict[str, int] = {}
        for name, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in AXES}

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ only on ``axes``; every rank is in exactly one.

        Sorted, so that all ranks build them in the same order.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault(tuple(at[name] for name in AXES if name not in axes), []).append(rank)
        return sorted(tuple(ranks) for ranks in found.values())


# --- the mesh -------------------------------------------------------------------------------------

# Process groups of each world by (ranks, seconds that a collective may take): torch keeps groups
# for the life of the world, so a second engine must not build them again. The directed ones are for
# messages from the first rank to the second.
_GROUPS: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], float], Any]] = WeakKeyDictionary()
_DIRECTED_GROUPS: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], float], Any]] = WeakKeyDictionary()

# The mesh that was built last, for DeepSpeed's functions that return groups without an engine.
_LATEST: WeakValueDictionary[str, Mesh] = WeakValueDictionary()

# Extra communicators that span several axes: `data` for batches and losses, `world` for everything.
_COMBINED = {"data": ("replica", "shard"), "world": AXES}


class Mesh:
    """This rank's axes: ``mesh.shard``, ``mesh.replica``, ``mesh.pipe``, ``mesh.model``, and the
    combined ``mesh.data`` and ``mesh.world``."""

    def __init__(
        self,
        shape: MeshShape,
        rank: int,
        axes: dict[str, AxisComm],
        counters: CommCounters,
        heartbeat: Heartbeat,
        coordinates: dict[str, int] | None = None,
        model_part: tuple[int, int] | None = None,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinates = coordinates if coordinates is not None else shape.coordinates(rank)
        self.counters = counters
        self.heartbeat = heartbeat
        self.pipe, self.replica, self.shard, self.model = (axes[name] for name in AXES)
        self.data = axes["data"]
        self.world = axes["world"]
        # (part, parts) of a model that is parallel itself: other parts have different tensors under
        # the same names.
        self.model_part = model_part if model_part is not None else (self.coordinates["model"], shape.model)
        _LATEST["mesh"] = self


def latest_mesh() -> Mesh | None:
    """Return the mesh that this process built last, while an engine or another owner holds it."""
    return _LATEST.get("mesh")


def build_mesh(
    shape: MeshShape, *, timeout: float = DEFAULT_TIMEOUT_SECONDS, shared_memory: bool = True, add: Sum = sum_in_order
) -> Mesh:
    """Build the mesh of ``shape`` for this rank.

    Collective over the world the first time that a shape is requested.

    Args:
        timeout: seconds that a wait may take.
        shared_memory: let CPU ranks of one host exchange tensors through shared memory if they can.
        add: computes the sums of CPU tensors.

    Raises MeshError unless the shape has as many ranks as the world.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    if shape.world_size != world:
        raise MeshError(
            "the mesh does not have as many ranks as the world", where="mesh", got=shape, expected=f"{world} ranks"
        )
    counters, heartbeat = CommCounters(), world_heartbeat()
    number = heartbeat.count_mesh()

    def comm(name: str, axes: tuple[str, ...]) -> AxisComm:
        mine, group = _own_group(shape, axes, rank, timeout)
        return AxisComm(name, mine, mine.index(rank), group, counters, heartbeat, timeout, add, number=number)

    axes = {name: comm(name, (name,)) for name in AXES} | {name: comm(name, spans) for name, spans in _COMBINED.items()}
    if shared_memory:
        for axis in axes.values():
            share_memory_if_possible(axis)
    counters.reset()  # do not count the traffic of building the mesh
    travel = ", ".join(f"{name} {axis.size}: {axis.transport_name}" for name, axis in axes.items() if axis.size > 1)
    log.debug("mesh of rank %d at %s; tensors on the host over %s", rank, shape.coordinates(rank), travel or "no axis")
    return Mesh(shape, rank, axes, counters, heartbeat)


def part_of_pipe(mesh: Mesh, stages: tuple[int, ...], name: str) -> AxisComm | None:
    """Return a communicator between the ranks ``stages`` of this rank's pipeline, for data that
    only they share; None on other ranks.

    Collective over the world, with the same arguments: torch builds groups collectively.
    """
    own: AxisComm | None = None
    for line in mesh.shape.groups("pipe"):
        ranks = tuple(line[stage] for stage in stages)
        group = _group(ranks, mesh.pipe.watch.timeout) if len(ranks) > 1 else None
        if mesh.rank in ranks:
            place, pipe = ranks.index(mesh.rank), mesh.pipe
            number = pipe.order.number
            own = AxisComm(
                name, ranks, place, group, mesh.counters, mesh.heartbeat, pipe.watch.timeout, pipe.add, number=number
            )
    if own is not None:
        share_memory_if_possible(own)
    return own


def mesh_around(
    group: Any,
    *,
    model_size: int = 1,
    model_group: Any = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    add: Sum = sum_in_order,
) -> Mesh:
    """Build a mesh around a client's data-parallel group (an ``mpu`` with get_data_parallel_group):
    its ranks are on the shard axis.

    ``model_group`` (get_model_parallel_group) makes the model axis; without it the client handles
    that axis, and ``model_size`` only enters the shape, so that batch arithmetic is right. Each
    data-parallel group of the client counts as a separate part of the model. Collective over
    the world.
    """
    rank, world = (dist.get_rank(), world_size()) if is_distributed() else (0, 1)
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,)
    counters, heartbeat = CommCounters(), world_heartbeat()
    number = heartbeat.count_mesh()

    def comm(name: str, among: tuple[int, ...], own: Any) -> AxisComm:
        return AxisComm(name, among, among.index(rank), own, counters, heartbeat, timeout, add, number=number)

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
    return Mesh(shape, rank, axes, counters, heartbeat, coordinates, (groups.index(ranks), len(groups)))


def _own_group(shape: MeshShape, axes: tuple[str, ...], rank: int, timeout: float) -> tuple[tuple[int, ...], Any]:
    """Return this rank's line along ``axes`` and its group. Collective, in one order."""
    mine: tuple[int, ...] = (rank,)
    own: Any = None
    for ranks in shape.groups(*axes):
        group = _group(ranks, timeout) if len(ranks) > 1 else None
        if rank in ranks:
            mine, own = ranks, group
    return mine, own


def _group(ranks: tuple[int, ...], timeout: float) -> Any:
    world = dist.group.WORLD
    return world if len(ranks) == dist.get_world_size() else _made_once(_GROUPS.setdefault(world, {}), ranks, timeout)


def _made_once(known: dict[tuple[tuple[int, ...], float], Any], ranks: tuple[int, ...], timeout: float) -> Any:
    """Return the group of ``ranks`` from ``known``, or create it. Collective over the world.

    ``timeout`` (seconds) is also set on the group: NCCL's watchdog bounds a collective on a device
    by it, since the host does not wait for that collective.
    """
    if (ranks, timeout) not in known:
        known[ranks, timeout] = dist.new_group(sorted(ranks), timeout=timedelta(seconds=timeout))
    return known[ranks, timeout]


# --- whether ranks can map each other's memory: tried, not guessed from host names ----------------

_SECRET = 64  # bytes; the board of calls follows

_SharedAxis = tuple[dict[int, mmap], CallBoard]
"""What the ranks of one axis share: the arenas of the others, by axis index, and their calls."""


@dataclass
class _Host:
    """This process's arena (None if the system has no such memory) and its peers', and the result
    for each axis (None: its ranks cannot read each other's memory). Finding it costs two
    exchanges."""

    arena: Arena | None
    peers: dict[int, mmap] = field(default_factory=dict)  # by process id
    axes: dict[tuple[int, ...], _SharedAxis | None] = field(default_factory=dict)
    under_way: UnderWay = field(default_factory=UnderWay)


_HOSTS: WeakKeyDictionary[Any, _Host] = WeakKeyDictionary()  # by world


def share_memory_if_possible(comm: AxisComm) -> bool:
    """Let ``comm`` use shared memory if every rank can read every other's.

    Collective over the axis on the first call.

    Each rank writes a random number into its arena; a peer that reads another number, or nothing,
    is on another host or in another container.
    """
    if comm.size == 1 or not comm.takes_host_tensors:
        return False
    world = dist.group.WORLD
    if world not in _HOSTS:
        _HOSTS[world] = _open_host()
    host = _HOSTS[world]
    if comm.ranks not in host.axes:
        host.axes[comm.ranks] = _probe(comm, host)
    axis = host.axes[comm.ranks]
    if axis is None or host.arena is None:
        return False
    comm.share_memory(SharedTransport(comm.index, comm.size, host.arena, *axis, comm.add, host.under_way))
    return True


def _open_host() -> _Host:
    why = why_not_shared()
    try:
        if not why:
            return _Host(Arena(dist.get_world_size()))
    except (OSError, AttributeError) as trouble:  # no memfd, or too few addresses (ulimit -v)
        why = str(trouble)
    if dist.get_rank() == 0:
        log.warning("ranks exchange tensors on the host over gloo, slower than through shared memory: %s", why)
    return _Host(None)


def _probe(comm: AxisComm, host: _Host) -> _SharedAxis | None:
    row: list[int] = []
    if host.arena is not None:
        offset, block = host.arena.block(_SECRET + CallBoard.NBYTES)
        block.cast("q")[0] = secret = secrets.randbits(62)
        row = [host.arena.process, host.arena.descriptor, host.arena.size, offset, secret]
    rows = comm.gather_json(row, "can memory be shared?")
    axis = _open_axis(comm, host, block[_SECRET:], rows) if all(rows) else None
    answers = comm.gather_json(axis is not None, "can all share memory?")
    if all(answers):
        log.debug("tensors on the host over %s: shared memory", comm.name)
        return axis
    blind = [comm.ranks[index] for index, can_read in enumerate(answers) if not can_read]
    log.debug("tensors on the host over %s: gloo; ranks %s cannot read the others' memory", comm.name, blind)
    return None


def _open_axis(comm: AxisComm, host: _Host, calls: memoryview, rows: list[list[int]]) -> _SharedAxis | None:
    """Map the arenas of all ranks of the axis; None if one cannot be reached or watched."""
    others, boards, processes = {}, {}, {}
    try:
        for index, (process, descriptor, size, offset, secret) in enumerate(rows):
            if index == comm.index:
                continue
            if process not in host.peers:
                host.peers[process] = map_peer(process, descriptor, size)
            others[index], processes[index] = host.peers[process], process
            block = memoryview(others[index])[offset : offset + _SECRET + CallBoard.NBYTES]
            if block.cast("q")[0] != secret:
                return None
            boards[index] = block[_SECRET:]
        peers = PeerProcesses(processes, comm.heartbeat.is_crossed, host.under_way.go_on)
    except (OSError, ValueError):
        return None
    return others, CallBoard(calls, boards, peers)


# --- a communicator for each direction ------------------------------------------------------------


def directed_pairs(shape: MeshShape, hops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (from rank, to rank) for each hop between two pipeline stages, in every pipeline of
    the mesh. Pure; the same on all ranks."""
    return [(line[source], line[target]) for line in shape.groups("pipe") for source, target in hops]


def open_direction_groups(mesh: Mesh, hops: Sequence[tuple[int, int]]) -> None:
    """Make a separate communicator for messages along ``mesh.pipe`` for each of ``hops`` (from
    stage, to stage).

    NCCL runs the operations of a communicator in one order. Two ranks that each send before they
    receive would deadlock on a shared one; with one for each direction there are only sends
    on one end and receives on the other, in the same order.

    Collective over the world: all ranks must pass the same hops. An unused communicator costs only
    its name.
    """
    known = _DIRECTED_GROUPS.setdefault(dist.group.WORLD, {})
    stage_of = {rank: stage for stage, rank in enumerate(mesh.pipe.ranks)}
    for pair in directed_pairs(mesh.shape, hops):
        group = _made_once(known, pair, mesh.pipe.watch.timeout)
        if all(rank in stage_of for rank in pair):
            mesh.pipe.directions[stage_of[pair[0]], stage_of[pair[1]]] = group
