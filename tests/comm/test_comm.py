"""Tests for zero_trial/comm/collective.py: sums in rank order bit for bit, and traffic by formula."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape, build_mesh
from zero_trial.comm.health import Heartbeat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
    return AxisComm("shard", (0,), 0, None, CommCounters(), Heartbeat(None, 0, 1), 1.0)


def test_an_axis_of_one_rank_communicates_nothing() -> None:
    comm = alone()
    full, part = torch.arange(4.0), torch.zeros(4)
    comm.reduce_scatter(full, part, "x").wait()
    assert part.tolist() == [0, 1, 2, 3]
    comm.reduce_scatter(full, full, "x").wait()
    comm.all_gather(full, torch.full((4,), 7.0), "x").wait()
    assert full.tolist() == [7] * 4
    pending = comm.all_reduce(full, "x")
    pending.start_next()
    pending.wait()
    comm.all_reduce_small(full, "x")
    comm.broadcast(full, "x")
    comm.barrier("x")
    assert comm.gather_json({"a": 1}, "x") == [{"a": 1}]
    assert full.tolist() == [7] * 4
    assert comm.counters.table() == {}
    assert comm.heartbeat.sequence == 0
