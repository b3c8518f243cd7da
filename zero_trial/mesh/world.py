"""Joining the world: torch.distributed is started once, with a time limit on every collective.

Without a launcher a process is a world of one and needs no process group at all.
"""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_trial.errors import MeshError
from zero_trial.mesh.arrival import arrive, not_found
from zero_trial.mesh.board import Board
from zero_trial.mesh.env import RankEnv, meeting_place, read_rank_env
from zero_trial.mesh.farewell import Farewell
from zero_trial.mesh.transport import moves_host_tensors

DEFAULT_TIMEOUT_SECONDS = 300.0

# One board per default process group; it goes when the group goes. The group itself is torch's process-wide state, this only hangs on it.
_BOARDS: WeakKeyDictionary[Any, Board] = WeakKeyDictionary()


def is_distributed() -> bool:
    """True once this process is a member of a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Ranks in the world; 1 when there is no process group."""
    return dist.get_world_size() if is_distributed() else 1


def rank_and_size() -> tuple[int, int]:
    """This process's rank in the world and the world's size; (0, 1) when there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def agree_on(numbers: Sequence[float]) -> list[float]:
    """Rank 0's ``numbers`` on every rank, which must pass equally many. Collective over the world."""
    if world_size() == 1:
        return list(numbers)
    device = "cpu" if moves_host_tensors(None) else "cuda"
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.broadcast(values, 0)
    return [float(value) for value in values.tolist()]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> RankEnv:
    """Starts torch.distributed if it is not running and says where this rank stands.

    NCCL for CUDA, gloo otherwise, unless ``dist_backend`` names one. ``timeout`` (seconds or timedelta) bounds every collective.
    Collective: all ranks of the launcher must call it. Raises MeshError when the other ranks do not arrive in time.
    ``auto_mpi_discovery`` and ``verbose`` are accepted for compatibility: MPI's variables are always read, and nothing is printed.
    """
    env = read_rank_env()
    if rank >= 0 or world_size >= 0:
        env = RankEnv(max(rank, 0), max(world_size, 1), env.local_rank, env.local_world_size, True)
    if is_distributed():
        return RankEnv(dist.get_rank(), dist.get_world_size(), env.local_rank, env.local_world_size, env.launched)
    if dist_init_required is False:
        raise MeshError(
            "torch.distributed is not running although dist_init_required=False says so",
            fix="Call init_distributed first.",
        )
    limit = (
        timeout
        if isinstance(timeout, datetime.timedelta)
        else datetime.timedelta(seconds=timeout or DEFAULT_TIMEOUT_SECONDS)
    )
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    try:
        if not env.launched:
            dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=limit)  # type: ignore[attr-defined]
        else:
            method = init_method or meeting_place(distributed_port)
            store = arrive(method, env, limit)
            dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise not_found(env, error, []) from error
    atexit.register(
        destroy_distributed
    )  # a thread that still talks to the store while the interpreter goes down would abort it
    return env


def world_board() -> Board:
    """The board of the running process group; a board of one rank when there is none."""
    if not is_distributed():
        return Board(None, 0, 1)
    group = dist.group.WORLD
    if group not in _BOARDS:
        _BOARDS[group] = Board(_default_store(), dist.get_rank(), dist.get_world_size())
    return _BOARDS[group]


def open_farewell() -> Farewell:
    """What the ranks of the running process group tell each other when one of them leaves early."""
    return Farewell(_default_store() if is_distributed() and dist.get_world_size() > 1 else None)


def _default_store() -> Any:
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    return getter() if getter is not None else None


def destroy_distributed() -> None:
    """Leaves the world: stops the board's thread, then the process group. Safe to call twice."""
    if is_distributed():
        board = _BOARDS.pop(dist.group.WORLD, None)
        if board is not None:
            board.close()
        dist.destroy_process_group()
