"""Silence, a rank at another place and a rank that ends become errors that say who and where."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters
from zero_trial.comm.rendezvous import world_heartbeat
from zero_trial.errors import MeshError

PATIENCE = datetime.timedelta(seconds=60)


def fresh_line(timeout: float) -> AxisComm:
    """All ranks on an axis with a process group of its own: a timeout breaks a group for good, and
    the pool must live on."""
    size = dist.get_world_size()
    board = world_heartbeat()
    reached = torch.tensor([board.sequence])
    dist.all_reduce(reached, dist.ReduceOp.MAX)
    board.sequence = int(reached) + 1  # earlier tests may have left the ranks at different counts
    group, patience = dist.new_group(list(range(size))), PATIENCE.total_seconds()
    comm = AxisComm("shard", tuple(range(size)), dist.get_rank(), group, CommCounters(), board, patience)
    comm.barrier("start")  # with patience: on a busy machine ranks leave new_group far apart
    comm.watch.timeout = timeout
    return comm


def call(comm: AxisComm, operation: str, late: int) -> None:
    full = torch.ones(8 * comm.size)
    if operation == "reduce_scatter":
        comm.reduce_scatter(full, torch.empty(8), "grads").wait()
    elif operation == "all_gather":
        comm.all_gather(full, torch.empty(8), "weights").wait()
    elif operation == "all_reduce":
        comm.all_reduce(full, "grads").wait()
    elif operation == "all_reduce_small":
        comm.all_reduce_small(torch.ones(1), "norm")
    elif operation == "broadcast":
        comm.broadcast(full, "values", source=late)
    else:
        comm.gather_json({}, "facts")


def wait_in_vain(operation: str, late: int, salt: str) -> str:
    """Everyone but rank ``late`` enters ``operation``; the error of those who waited."""
    comm = fresh_line(timeout=0.3)
    store: Any = dist.distributed_c10d._get_default_store()
    comm.heartbeat.step = 3 if comm.index == late else 17
    keys = [f"{salt}/{index}" for index in range(comm.size)]
    try:
        if comm.index == late:
            store.wait([key for index, key in enumerate(keys) if index != late], PATIENCE)
            return "late"
        try:
            call(comm, operation, late)
        except MeshError as error:
            return str(error)
        finally:
            store.set(keys[comm.index], "done")
        return "no error"
    finally:
        comm.heartbeat.step = 0
        dist.destroy_process_group(comm.group)


NAMES = {
    "reduce_scatter": "reduce_scatter(grads)",
    "all_gather": "all_gather(weights)",
    "all_reduce": "all_reduce(grads)",
    "all_reduce_small": "all_reduce(norm)",
    "broadcast": "broadcast(values)",
    "gather_json": "all_reduce(facts)",
}


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce_small", "broadcast", "gather_json"])
def test_a_rank_that_never_arrives_is_named(ranks: Pools, operation: str) -> None:
    waited, late = ranks(2).run(wait_in_vain, operation, 1, f"vain/2/{operation}")
    assert late == "late"
    assert waited.startswith(
        f"rank 0, step 17, {NAMES[operation]} over shard: waited 0.3 s for rank 1, which never reached"
    ), waited


def come_too_late(salt: str) -> str:
    """Rank 1 comes when rank 0 has given up."""
    comm = fresh_line(timeout=0.3)
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        if comm.index == 1:
            store.wait([salt], PATIENCE)
        call(comm, "all_gather", 1)
    except MeshError as error:
        return str(error)
    finally:
        store.set(salt, "done")
        store.set(f"{salt}/{comm.index}", "done")
        store.wait([f"{salt}/0", f"{salt}/1"], PATIENCE)
        dist.destroy_process_group(comm.group)
    return "no error"


def test_a_rank_that_comes_too_late_gets_an_error(ranks: Pools) -> None:
    waited, late = ranks(2).run(come_too_late, "too late")
    assert "waited 0.3 s for rank 1" in waited
    assert late.startswith("rank 1, step 0, all_gather(weights) over shard: rank 0 gave up before this rank came."), (
        late
    )


def disagree(salt: str) -> str:
    """Rank 0 reduces while rank 1 gathers, with the same sizes."""
    comm = fresh_line(timeout=0.3)
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        call(comm, "reduce_scatter" if comm.index == 0 else "all_gather", 1)
    except MeshError as error:
        return str(error)
    finally:
        store.set(f"{salt}/{comm.index}", "done")
        store.wait([f"{salt}/0", f"{salt}/1"], PATIENCE)
        dist.destroy_process_group(comm.group)
    return "no error"


def test_ranks_in_different_collectives_get_an_error_and_no_numbers(ranks: Pools) -> None:
    first, second = ranks(2).run(disagree, "disagree")
    assert "reduce_scatter(grads) over shard" in first.split(": ")[0]
    assert "all_gather(weights) over shard" in second.split(": ")[0] and "no error" not in (first, second)
