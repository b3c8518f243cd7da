"""Silence, a rank at another place and a rank that ends become errors that say who and where."""

from __future__ import annotations

import datetime
from collections.abc import Callable
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


Verb = Callable[[AxisComm, torch.Tensor], object]
VERBS: dict[str, Verb] = {
    "reduce_scatter(grads)": lambda comm, full: comm.reduce_scatter(full, torch.empty(8), "grads").wait(),
    "all_gather(weights)": lambda comm, full: comm.all_gather(full, torch.empty(8), "weights").wait(),
    "all_reduce(norm)": lambda comm, full: comm.all_reduce_small(torch.ones(1), "norm"),
    "broadcast(values)": lambda comm, full: comm.broadcast(full, "values", source=1),
    "all_reduce(facts)": lambda comm, full: comm.gather_json({}, "facts"),
}


def call(comm: AxisComm, operation: str) -> None:
    VERBS[operation](comm, torch.ones(8 * comm.size))


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
            call(comm, operation)
        except MeshError as error:
            return str(error)
        finally:
            store.set(keys[comm.index], "done")
        return "no error"
    finally:
        comm.heartbeat.step = 0
        dist.destroy_process_group(comm.group)


@pytest.mark.parametrize("operation", sorted({*VERBS} - {"all_gather(weights)"}))
def test_a_rank_that_never_arrives_is_named(ranks: Pools, operation: str) -> None:
    waited, late = ranks(2).run(wait_in_vain, operation, 1, f"vain/2/{operation}")
    assert late == "late"
    assert waited.startswith(
        f"rank 0, step 17, {operation} over shard: waited 0.3 s for rank 1, which never reached"
    ), waited


def meet(salt: str, operations: tuple[str, str], late: bool) -> str:
    """The error of this rank's call; with ``late``, rank 1 comes when rank 0 has given up."""
    comm = fresh_line(timeout=0.3)
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        if late and comm.index == 1:
            store.wait([f"{salt}/0"], PATIENCE)
        call(comm, operations[comm.index])
    except MeshError as error:
        return str(error)
    finally:
        store.set(f"{salt}/{comm.index}", "done")
        store.wait([f"{salt}/0", f"{salt}/1"], PATIENCE)
        dist.destroy_process_group(comm.group)
    return "no error"


def test_a_rank_that_comes_too_late_gets_an_error(ranks: Pools) -> None:
    waited, late = ranks(2).run(meet, "too late", ("all_gather(weights)",) * 2, True)
    assert "waited 0.3 s for rank 1" in waited
    assert late.startswith(
        "rank 1, step 0, all_gather(weights) over shard: rank 0 timed out before this rank arrived."
    ), late


def test_ranks_in_different_collectives_get_an_error_and_no_numbers(ranks: Pools) -> None:
    first, second = ranks(2).run(meet, "disagree", ("reduce_scatter(grads)", "all_gather(weights)"), False)
    assert "reduce_scatter(grads) over shard" in first.split(": ")[0]
    assert "all_gather(weights) over shard" in second.split(": ")[0] and "no error" not in (first, second)
