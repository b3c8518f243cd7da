"""The verbs of an axis: sums in rank order bit for bit, on either transport, and traffic by
formula."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape, build_mesh
from zero_trial.comm.backends import Traffic
from zero_trial.comm.waits import Heartbeat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def line() -> Mesh:
    """All ranks of the pool on the shard axis."""
    return build_mesh(MeshShape(shard=dist.get_world_size()))


def values_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What ``rank`` contributes; every rank can make those of all. Magnitudes differ, so that the
    order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank % 3)).to(dtype)


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """From rank 0 upwards; 16-bit values in fp32 and rounded once."""
    total = parts[0].float() if parts[0].dtype.itemsize == 2 else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


# Where a tensor is put before a collective gets it.
Put = Callable[[torch.Tensor], torch.Tensor]


class Places:
    """Puts about two of three tensors into buffers that peers read in place, at any element of
    them; every rank chooses for itself."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._chance = random.Random(comm.index)
        self._buffers = {dtype: comm.buffer(most + 64, dtype, torch.device("cpu")) for dtype in DTYPES}
        self.used = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._chance.random() < 1 / 3:
            return tensor.clone()
        self.used += 1
        start = self._chance.randrange(64)
        return self._buffers[tensor.dtype][start : start + tensor.numel()].copy_(tensor)


def exchange(comm: AxisComm, numel: int, dtype: torch.dtype, seed: int, put: Put) -> None:
    """Compare a reduction, and one other collective, with the ordered sum. Inputs are overwritten
    as soon as they are this rank's again."""
    parts = [values_of(peer, numel, dtype, seed) for peer in range(comm.size)]
    total, own = ordered_sum(parts), parts[comm.index]
    low, high = comm.index * numel // comm.size, (comm.index + 1) * numel // comm.size
    case = (numel, dtype, seed)

    out, full = torch.empty(numel // comm.size, dtype=dtype), put(own)
    comm.reduce_scatter(full, out, "grads").wait()
    assert torch.equal(out, total[low:high]), case
    assert torch.equal(full, own), "the input is left as it was"
    full.fill_(float("nan"))

    if seed % 5 == 0:
        gathered, shard = torch.full((numel,), float("nan"), dtype=dtype), put(out)
        comm.all_gather(gathered, shard, "params").wait()
        shard.fill_(float("nan"))
        assert torch.equal(gathered, total), case
        return
    whole = put(own)
    if seed % 5 == 1:
        comm.all_reduce(whole, "all").wait()
        assert torch.equal(whole, total), case
    elif seed % 5 == 2:
        comm.broadcast(whole, "values", source=seed % comm.size)
        assert torch.equal(whole, parts[seed % comm.size]), case
    elif seed % 5 == 3:
        comm.reduce_scatter(whole, whole[low:high], "in place").wait()
        assert torch.equal(whole[low:high], total[low:high]), case
    else:
        whole[low:high] = total[low:high]
        comm.all_gather(whole, whole[low:high], "gather in place").wait()
        assert torch.equal(whole, total), case
    whole.fill_(float("nan"))


def random_collectives(shared: bool, count: int) -> int:
    """Try random sizes and dtypes; return how many tensors were in a buffer that peers read in
    place."""
    comm = build_mesh(MeshShape(shard=dist.get_world_size()), shared_memory=shared).shard
    assert comm.transport_name == ("shared memory" if shared else "gloo")
    assert comm.shares_memory(torch.device("cpu")) is shared
    chance, put = random.Random(5), Places(comm, comm.size * 65536)
    for seed in range(count):
        numel = comm.size * chance.choice([1, 3, 31, 513, 8192, 16384, 65536, chance.randint(1, 40_000)])
        exchange(comm, numel, chance.choice(DTYPES), seed, put)
    return put.used


@pytest.mark.parametrize(
    ("shared", "world", "count"), [(False, 2, 16), (False, 4, 16), (True, 2, 200), (True, 3, 80), (True, 4, 20)]
)
def test_sums_have_the_bits_of_rank_order_wherever_tensors_are(
    ranks: Pools, shared: bool, world: int, count: int
) -> None:
    assert min(ranks(world).run(random_collectives, shared, count)) > count


def uneven(shared: bool) -> tuple[int, int]:
    """Every rank sends each other rank another number of elements, some none, and rank 1 sends
    nothing at all."""
    size = dist.get_world_size()
    comm = build_mesh(MeshShape(shard=size), shared_memory=shared).shard
    counts = [[0 if i in (j, 1) else 5 * i + 3 * j for j in range(size)] for i in range(size)]
    for dtype in DTYPES:
        row = counts[comm.index]
        flat = comm.buffer(sum(row), dtype, torch.device("cpu")) if dtype == torch.float32 else None
        sent = flat if flat is not None else torch.empty(sum(row), dtype=dtype)
        sent.copy_(torch.cat([torch.full((n,), 10.0 * comm.index + j) for j, n in enumerate(row)]))
        received = torch.full((sum(line[comm.index] for line in counts),), float("nan"), dtype=dtype)
        comm.all_to_all(sent, received, counts, "parts").wait()
        sent.fill_(float("nan"))
        whose = [torch.full((line[comm.index],), 10.0 * i + comm.index) for i, line in enumerate(counts)]
        assert torch.equal(received.float(), torch.cat(whose)), (dtype, received)
    return comm.counters.get("all_to_all", "shard").elements, len(DTYPES) * sum(counts[comm.index])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "gloo"])
def test_parts_of_any_size_reach_their_ranks(ranks: Pools, shared: bool) -> None:
    for counted, expected in ranks(3).run(uneven, shared):
        assert counted == expected


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
        moved = value if mine else torch.zeros_like(value) if 0 not in value.stride() else torch.zeros(3).expand(4, 3)
        strides = moved.stride()
        mesh.shard.broadcast(moved, "buffer")
        assert torch.equal(
            moved.contiguous().view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8)
        ), value.dtype
        assert moved.stride() == strides


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


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
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
    pending.wait()
    comm.all_reduce_small(full, "x")
    comm.broadcast(full, "x")
    comm.barrier("x")
    assert comm.gather_json({"a": 1}, "x") == [{"a": 1}] and full.tolist() == [7] * 4 and comm.counters.table() == {}
    assert comm.heartbeat.sequence == 0


def test_totals_are_over_axes() -> None:
    counters = CommCounters()
    counters.add("all_reduce", "shard", 1, 8)
    counters.add("all_reduce", "replica", 10, 4)
    counters.add("all_gather", "shard", 100, 4)
    assert counters.total() == Traffic(3, 111, 448) and counters.total("all_reduce") == Traffic(2, 11, 48)
    assert counters.total("all_reduce", "all_gather") == Traffic(3, 111, 448) and counters.total("send") == Traffic()
