"""Arriving at the meeting place: every rank signs in there, so that those who wait in vain can say for whom.

rank 0 opens the store (or a launcher's agent has) ─► each rank signs in ─► all are there ─► the process group is made over the store
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

from zero_trial.comm.backends import moves_host_tensors
from zero_trial.comm.env import RankEnv, meeting_place, own_store_address, read_rank_env
from zero_trial.comm.health import Heartbeat
from zero_trial.errors import MeshError

KEY = "zero_trial/arrived/"


LINGER_SECONDS = 1.0  # so long rank 0, whose store goes with it, stays for the others to ask who is missing


def open_store(method: str, env: RankEnv, limit: datetime.timedelta) -> Any:
    """The store of the meeting place ``method`` (``env://``, ``tcp://host:port``, ``file://...``). Does not wait for other ranks, but for
    the one that keeps it.

    Raises RuntimeError or ValueError where it cannot be had.
    """
    address = own_store_address(method)
    if address is None:
        store, _, _ = next(rendezvous(method, env.rank, env.world_size, timeout=limit))
        return store
    host, port = address
    return TCPStore(
        host, port, env.world_size, env.rank == 0, limit, wait_for_workers=False, multi_tenant=True, use_libuv=True
    )


def arrive(method: str, env: RankEnv, limit: datetime.timedelta) -> Any:
    """Collective. The store, once all ranks have signed in. Raises MeshError that names those who have not within ``limit``."""
    try:
        store = open_store(method, env, limit)
    except (RuntimeError, ValueError) as error:
        raise rendezvous_error(
            env, error, [0] if env.rank != 0 and own_store_address(method) is not None else []
        ) from error
    try:
        store.set(f"{KEY}{env.rank}", "1")
        store.wait([f"{KEY}{rank}" for rank in range(env.world_size)], limit)
    except RuntimeError as error:
        missing = missing_ranks(store, env.world_size)
        if env.rank == 0:
            time.sleep(LINGER_SECONDS)
        raise rendezvous_error(env, error, missing) from error
    return store


def missing_ranks(store: Any, world_size: int) -> list[int]:
    """The ranks that have not signed in; none if the store is gone."""
    try:
        return [rank for rank in range(world_size) if not store.check([f"{KEY}{rank}"])]
    except RuntimeError:
        return []


def rendezvous_error(env: RankEnv, error: Exception, missing: list[int]) -> MeshError:
    """The MeshError of a rank that has not found the others."""
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    names = ", ".join(f"rank {rank}" for rank in missing)
    came = f"{names} never came" if missing else words
    return MeshError(
        f"the ranks did not find each other: {came}",
        where=f"rank {env.rank} of {env.world_size}, init_distributed",
        fix=f"Check that {names or 'every rank'} was started, and that MASTER_ADDR and MASTER_PORT are reachable from there.",
    )


# An agreed early end: one rank leaves for a good reason, and every other one leaves too instead of waiting for it.
#
# rank 1   claim("early exit") -> True      a key in the process group's store, so it is seen before rank 1's connections close
# rank 0   in a collective with rank 1      its watch sees the key within a second and ends the process in order
# rank 2   raises for the same reason       claim("early exit") -> False: somebody else has told already


PERIOD_SECONDS = 0.5


GRACE_SECONDS = 3.0  # for a rank that is about to leave by itself


FAREWELL_KEY = "zero_trial/claim/"


class ExitNotice:
    """This rank's view of what the ranks have claimed. ``store`` is the process group's; None for a world of one."""

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._own: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, name: str) -> bool:
        """Whether this rank is the first of all to claim ``name``. A store that is gone leaves it to each rank."""
        if name in self._own:
            return False
        self._own.add(name)
        if self._store is None:
            return True
        try:
            return int(self._store.add(FAREWELL_KEY + name, 1)) == 1
        except RuntimeError:
            return True

    def claimed(self, name: str) -> bool:
        """Whether any rank has claimed ``name``."""
        if name in self._own:
            return True
        try:
            return self._store is not None and bool(self._store.check([FAREWELL_KEY + name]))
        except RuntimeError:  # its host is gone
            return False

    def watch(self, name: str, leave: Callable[[], None] | None = None) -> None:
        """From now on ``leave()`` is called, by a thread, soon after another rank has claimed ``name``.

        Unless given, it ends this process with code 0: the main thread may be stuck in a collective that never ends.
        """
        if self._store is None or self._thread is not None:
            return
        arguments = (name, leave if leave is not None else leave_process)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="zero_trial-farewell", daemon=True)
        self._thread.start()

    def _watch(self, name: str, leave: Callable[[], None]) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            if name not in self._own and self.claimed(name):
                if not self._stop.wait(GRACE_SECONDS):
                    leave()
                return

    def close(self) -> None:
        """Stops watching. Before the process group is left: the store goes with it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None


def leave_process() -> None:
    """Ends this process at once with code 0; what was printed is kept."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# Joining the world: torch.distributed is started once, with a time limit on every collective.
#
# Without a launcher a process is a world of one and needs no process group at all.


DEFAULT_TIMEOUT_SECONDS = 300.0


# One heartbeat per default process group; it goes when the group goes. The group itself is torch's process-wide state, this only hangs on it.
_HEARTBEATS: WeakKeyDictionary[Any, Heartbeat] = WeakKeyDictionary()


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
        raise rendezvous_error(env, error, []) from error
    atexit.register(
        destroy_distributed
    )  # a thread that still talks to the store while the interpreter goes down would abort it
    return env


def world_heartbeat() -> Heartbeat:
    """The heartbeat of the running process group; a heartbeat of one rank when there is none."""
    if not is_distributed():
        return Heartbeat(None, 0, 1)
    group = dist.group.WORLD
    if group not in _HEARTBEATS:
        _HEARTBEATS[group] = Heartbeat(_default_store(), dist.get_rank(), dist.get_world_size())
    return _HEARTBEATS[group]


def open_exit_notice() -> ExitNotice:
    """What the ranks of the running process group tell each other when one of them leaves early."""
    return ExitNotice(_default_store() if is_distributed() and dist.get_world_size() > 1 else None)


def _default_store() -> Any:
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    return getter() if getter is not None else None


def destroy_distributed() -> None:
    """Leaves the world: stops the heartbeat's thread, then the process group. Safe to call twice."""
    if is_distributed():
        heartbeat = _HEARTBEATS.pop(dist.group.WORLD, None)
        if heartbeat is not None:
            heartbeat.close()
        dist.destroy_process_group()
