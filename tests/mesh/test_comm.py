"""Tests for zero_trial/mesh/comm.py: sums in rank order bit for bit, traffic by formula, and silence that becomes an error."""

from __future__ import annotations

import datetime
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools, RankFailed, RankPool
from zero_trial.errors import MeshError
from zero_trial.mesh import AxisComm, CommCounters, Mesh, MeshShape, build_mesh
from zero_trial.mesh.board import Board
from zero_trial.mesh.comm import message_tag, wait_all
from zero_trial.mesh.world import world_board

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATIENCE = datetime.timedelta(seconds=60)


def line() -> Mesh:
    """All ranks of the pool on the shard axis."""
    return build_mesh(MeshShape(shard=dist.get_world_size()))


def values_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What ``rank`` contributes; every rank can make everybody's. Magnitudes differ, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank % 3)).to(dtype)


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """From rank 0 upwards; 16-bit values in fp32 and rounded once."""
    total = parts[0].float() if parts[0].dtype.itemsize == 2 else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def test_a_sum_along_an_axis(ranks: Pools) -> None:
    assert ranks(2).run(sum_along_an_axis) == [[1.0, 1.0], [1.0, 1.0]]


def sum_along_an_axis() -> list[float]:
    mesh = line()
    gradients = torch.full((4,), float(mesh.rank))
    own = torch.empty(2)
    mesh.shard.reduce_scatter(gradients, own, "gradients").wait()
    return own.tolist()


def random_collectives(seed: int, rounds: int) -> None:
    mesh = line()
    shard, size, rank = mesh.shard, mesh.shard.size, mesh.rank
    choose = random.Random(seed)
    for turn in range(rounds):
        dtype, numel = choose.choice(DTYPES), size * choose.choice([1, 3, 32, 513, 4096, 20000])
        salt = 100 * seed + turn
        parts = [values_of(peer, numel, dtype, salt) for peer in range(size)]
        total = ordered_sum(parts)
        low, high = rank * numel // size, (rank + 1) * numel // size

        apart, out = parts[rank].clone(), torch.empty(numel // size, dtype=dtype)
        shard.reduce_scatter(apart, out, "apart").wait()
        assert torch.equal(out, total[low:high]), ("reduce_scatter", dtype, numel)
        assert torch.equal(apart, parts[rank]), "the input is left as it was"

        within = parts[rank].clone()
        shard.reduce_scatter(within, within[low:high], "within").wait()
        assert torch.equal(within[low:high], total[low:high]), ("reduce_scatter in place", dtype, numel)

        whole = parts[rank].clone()
        shard.all_reduce(whole, "all").wait()
        assert torch.equal(whole, total), ("all_reduce", dtype, numel)

        gathered = torch.empty(numel, dtype=dtype)
        shard.all_gather(gathered, total[low:high].clone(), "gather").wait()
        assert torch.equal(gathered, total), ("all_gather", dtype, numel)
        gathered = torch.zeros(numel, dtype=dtype)
        gathered[low:high] = total[low:high]
        shard.all_gather(gathered, gathered[low:high], "gather in place").wait()
        assert torch.equal(gathered, total), ("all_gather in place", dtype, numel)

        source = choose.randrange(size)
        told = parts[rank].clone()
        shard.broadcast(told, "tell", source)
        assert torch.equal(told, parts[source]), ("broadcast", dtype, numel)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_sizes_and_dtypes_are_bit_equal_to_the_ordered_sum(ranks: Pools, world: int, seed: int) -> None:
    ranks(world).run(random_collectives, seed, 8)


def interleaved() -> None:
    """Several collectives under way at once, waited for in another order than they began."""
    mesh = line()
    shard, size, rank = mesh.shard, mesh.shard.size, mesh.rank
    buffers = [torch.full((size * 64,), float(rank + number)) for number in range(6)]
    pendings = [shard.all_reduce(buffer, f"buffer {number}") for number, buffer in enumerate(buffers)]
    outs = [torch.empty(64) for _ in range(3)]
    more = [shard.reduce_scatter(torch.full((size * 64,), 1.0), out, "more") for out in outs]
    for pending in reversed(more):
        pending.wait()
    wait_all(pendings)
    for pending in pendings:
        pending.wait()  # again: allowed, and nothing happens
    for number, buffer in enumerate(buffers):
        assert torch.equal(buffer, torch.full_like(buffer, sum(range(size)) + size * number))
    assert all(torch.equal(out, torch.full((64,), float(size))) for out in outs)


@pytest.mark.parametrize("world", [2, 3])
def test_many_collectives_under_way_at_once(ranks: Pools, world: int) -> None:
    ranks(world).run(interleaved)


def any_tensor() -> None:
    """Broadcast moves whatever a module may keep in a buffer."""
    mesh = line()
    mine = mesh.rank == 0
    for value in (
        torch.tensor(3.5),
        torch.tensor([True, False]),
        torch.tensor([1, 2], dtype=torch.int16),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.arange(6.0).view(2, 3).t(),
        torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last),
        torch.arange(8.0).to(torch.float8_e4m3fn),
        torch.empty(0, 3),
        torch.arange(3.0).expand(4, 3),
    ):
        told = value if mine else torch.zeros_like(value) if 0 not in value.stride() else torch.zeros(3).expand(4, 3)
        strides = told.stride()
        mesh.shard.broadcast(told, "buffer")
        assert torch.equal(
            told.contiguous().view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8)
        ), value.dtype
        assert told.stride() == strides


def test_any_tensor_can_be_broadcast(ranks: Pools) -> None:
    ranks(2).run(any_tensor)


def json_values() -> None:
    mesh = line()
    mine = {"rank": mesh.rank, "text": "ä\n" * mesh.rank, "list": [None, 1.5, True]}
    everyone = mesh.shard.gather_json(mine, "facts")
    assert [value["rank"] for value in everyone] == list(range(mesh.shard.size))
    assert everyone[mesh.rank] == mine
    assert everyone[-1]["text"] == "ä\n" * (mesh.shard.size - 1)
    assert mesh.shard.gather_json(None, "nothing") == [None] * mesh.shard.size


@pytest.mark.parametrize("world", [2, 3])
def test_gather_json(ranks: Pools, world: int) -> None:
    ranks(world).run(json_values)


def small_numbers() -> None:
    shard = line().shard
    for op, expected in (("sum", sum(range(shard.size))), ("max", shard.size - 1), ("min", 0)):
        value = torch.tensor([float(shard.index)], dtype=torch.float64)
        shard.all_reduce_small(value, "norm", op)
        assert value.item() == expected
    bad = torch.tensor([float("nan") if shard.index == 1 else 1.0])
    shard.all_reduce_small(bad, "norm")
    assert bad.isnan().all()


def test_small_reductions(ranks: Pools) -> None:
    ranks(3).run(small_numbers)


def traffic(numel: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    mesh = line()
    shard, size = mesh.shard, mesh.shard.size
    full = torch.ones(numel, dtype=dtype)
    shard.reduce_scatter(full, torch.empty(numel // size, dtype=dtype), "a").wait()
    shard.all_gather(full, torch.empty(numel // size, dtype=dtype), "b").wait()
    shard.all_reduce(full, "c").wait()
    shard.broadcast(full, "d", source=1)
    shard.all_reduce_small(torch.ones(3, dtype=torch.float64), "e")
    shard.barrier("f")
    return mesh.counters.table()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traffic_is_counted_by_the_formulas(ranks: Pools, world: int, dtype: torch.dtype) -> None:
    numel, width = 96 * world, dtype.itemsize
    once = numel * (world - 1) // world
    for rank, table in enumerate(ranks(world).run(traffic, numel, dtype)):
        sent = numel if rank == 1 else 0
        assert table == {
            "reduce_scatter/shard": {"calls": 1, "elements": once, "bytes": once * width},
            "all_gather/shard": {"calls": 1, "elements": once, "bytes": once * width},
            # the two small ones: three doubles and a barrier's float
            "all_reduce/shard": {"calls": 3, "elements": 2 * once + 4, "bytes": 2 * once * width + 28},
            "broadcast/shard": {"calls": 1, "elements": sent, "bytes": sent * width},
        }


def alone() -> AxisComm:
    return AxisComm("shard", (0,), 0, None, CommCounters(), Board(None, 0, 1), 1.0)


def test_an_axis_of_one_rank_communicates_nothing() -> None:
    comm = alone()
    full, part = torch.arange(4.0), torch.zeros(4)
    comm.reduce_scatter(full, part, "x").wait()
    assert part.tolist() == [0, 1, 2, 3]
    comm.reduce_scatter(full, full, "x").wait()
    comm.all_gather(full, torch.full((4,), 7.0), "x").wait()
    assert full.tolist() == [7] * 4
    pending = comm.all_reduce(full, "x")
    pending.turn()
    pending.wait()
    comm.all_reduce_small(full, "x")
    comm.broadcast(full, "x")
    comm.barrier("x")
    assert comm.gather_json({"a": 1}, "x") == [{"a": 1}]
    assert full.tolist() == [7] * 4
    assert comm.counters.table() == {}
    assert comm.board.sequence == 0


def test_tags_tell_collectives_apart() -> None:
    tags = {
        message_tag(number, name)
        for number in range(50)
        for name in ("all_gather(h0)", "all_gather(h1)", "reduce_scatter(h0)")
    }
    assert len(tags) == 150
    assert all(0 <= message_tag(number, "x") < 1 << 31 for number in (0, 1, (1 << 20) - 1, 1 << 20, 1 << 40))


# --- silence ------------------------------------------------------------------------------------------------------


def fresh_line(timeout: float) -> AxisComm:
    """All ranks on an axis with a process group of its own: a timeout breaks a group for good, and the pool must live on."""
    size = dist.get_world_size()
    board = world_board()
    reached = torch.tensor([board.sequence])
    dist.all_reduce(reached, dist.ReduceOp.MAX)
    board.sequence = int(reached) + 1  # earlier tests may have left the ranks at different counts
    comm = AxisComm(
        "shard", tuple(range(size)), dist.get_rank(), dist.new_group(list(range(size))), CommCounters(), board, timeout
    )
    comm.barrier("start")
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
    comm.board.step = 3 if comm.index == late else 17
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
        comm.board.step = 0
        dist.destroy_process_group(comm.group)


NAMES = {
    "reduce_scatter": "reduce_scatter(grads)",
    "all_gather": "all_gather(weights)",
    "all_reduce": "all_reduce(grads)",
    "all_reduce_small": "all_reduce(norm)",
    "broadcast": "broadcast(values)",
    "gather_json": "all_reduce(facts)",
}


@pytest.mark.parametrize("operation", NAMES)
def test_a_rank_that_never_arrives_is_named(ranks: Pools, operation: str) -> None:
    waited, late = ranks(2).run(wait_in_vain, operation, 1, f"vain/2/{operation}")
    assert late == "late"
    assert waited.startswith(
        f"rank 0, step 17, {NAMES[operation]} over shard: waited 0.3 s for rank 1, which never reached"
    ), waited


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_all_who_wait_name_the_one_that_is_late(ranks: Pools, operation: str) -> None:
    answers = ranks(3).run(wait_in_vain, operation, 1, f"vain/3/{operation}")
    for rank in (0, 2):
        assert answers[rank].startswith(
            f"rank {rank}, step 17, {NAMES[operation]} over shard: waited 0.3 s for rank 1,"
        ), answers[rank]


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


def test_a_rank_that_comes_too_late_is_told_so(ranks: Pools) -> None:
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
    assert "all_gather(weights) over shard" in second.split(": ")[0]
    assert "no error" not in (first, second)


def die(folder: str) -> None:
    mesh = line()
    mesh.board.step = 5
    mesh.shard.barrier("start")
    if mesh.rank == 1:
        dist.distributed_c10d._get_default_store().wait(["rank 0 is there"], PATIENCE)
        os._exit(9)
    own = torch.empty(8)
    pending = mesh.shard.reduce_scatter(torch.ones(16), own, "grads")
    dist.distributed_c10d._get_default_store().set("rank 0 is there", "1")
    try:
        pending.wait()
    except MeshError as error:
        (Path(folder) / "error").write_text(str(error))


def test_a_rank_that_dies_ends_the_others_at_once(tmp_path: Path) -> None:
    """No timeout is waited for: the mesh's own is 300 seconds, the test's 60."""
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match="rank 1 of 2\nthe process died"):
            pool.run(die, str(tmp_path), timeout=60)
    finally:
        pool.close()
    text = (tmp_path / "error").read_text()
    assert text.startswith(
        "rank 0, step 5, reduce_scatter(grads) over shard: another rank ended while this one waited for it."
    ), text
    assert "Look for that rank's own error: rank 1 " in text
