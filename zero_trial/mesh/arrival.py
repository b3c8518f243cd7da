"""Arriving at the meeting place: every rank signs in there, so that those who wait in vain can say for whom.

rank 0 opens the store (or a launcher's agent has) ─► each rank signs in ─► all are there ─► the process group is made over the store
"""

from __future__ import annotations

import datetime
import time
from typing import Any

from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

from zero_trial.errors import MeshError
from zero_trial.mesh.env import RankEnv, own_store_address

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
        raise not_found(env, error, [0] if env.rank != 0 and own_store_address(method) is not None else []) from error
    try:
        store.set(f"{KEY}{env.rank}", "1")
        store.wait([f"{KEY}{rank}" for rank in range(env.world_size)], limit)
    except RuntimeError as error:
        missing = absent(store, env.world_size)
        if env.rank == 0:
            time.sleep(LINGER_SECONDS)
        raise not_found(env, error, missing) from error
    return store


def absent(store: Any, world_size: int) -> list[int]:
    """The ranks that have not signed in; none if the store is gone."""
    try:
        return [rank for rank in range(world_size) if not store.check([f"{KEY}{rank}"])]
    except RuntimeError:
        return []


def not_found(env: RankEnv, error: Exception, missing: list[int]) -> MeshError:
    """The MeshError of a rank that has not found the others."""
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    names = ", ".join(f"rank {rank}" for rank in missing)
    came = f"{names} never came" if missing else words
    return MeshError(
        f"the ranks did not find each other: {came}",
        where=f"rank {env.rank} of {env.world_size}, init_distributed",
        fix=f"Check that {names or 'every rank'} was started, and that MASTER_ADDR and MASTER_PORT are reachable from there.",
    )
