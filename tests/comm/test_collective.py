"""The verbs of an axis: sums in rank order bit for bit, traffic by formula, what is under way, messages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape, build_mesh
from zero_trial.comm.collective import Traffic, message_tag
from zero_trial.comm.shm.segments import MappingRefused
from zero_trial.comm.waits import DONE, Heartbeat, Pending, Received, Watchdog, wait_all
from zero_trial.errors import MeshError

# --- comm ------------------------------------------------------------------------------------------------------------


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


# --- collectives -----------------------------------------------------------------------------------------------------


def test_tags_tell_collectives_apart() -> None:
    tags = {
        message_tag(number, name)
        for number in range(50)
        for name in ("all_gather(h0)", "all_gather(h1)", "reduce_scatter(h0)")
    }
    assert len(tags) == 150
    assert all(0 <= message_tag(number, "x") < 1 << 31 for number in (0, 1, (1 << 20) - 1, 1 << 20, 1 << 40))


# --- pending ---------------------------------------------------------------------------------------------------------


class Work:
    """One that says when it is waited for."""

    def __init__(self, diary: list[str]) -> None:
        self._diary = diary

    def wait(self, timeout: object) -> None:
        self._diary.append("work")


def watch() -> Watchdog:
    return Watchdog(Heartbeat(None, 0, 1), (0, 1), 1.0)


def test_the_two_ends_of_a_collective() -> None:
    diary: list[str] = []
    source = torch.ones(1)
    received = Received({1: source}, lambda: diary.append("released"))

    def finish() -> Received:
        diary.append("result")
        return received

    pending = Pending(watch(), "sum", [Work(diary)], finish, source, lambda tensor: diary.append("settled"))
    pending.wait_result(keep=True)
    assert diary == ["work", "result"]
    assert pending.received == {1: source}
    pending.wait()
    pending.wait()  # again: allowed, and nothing happens
    assert diary == ["work", "result", "settled"]
    pending.received.release()
    assert diary[3:] == ["released"]


def test_what_follows_is_waited_for_too() -> None:
    diary: list[str] = []
    second = Pending(watch(), "gather", [Work(diary)], lambda: diary.append("gathered"))
    first = Pending(watch(), "scatter", [], lambda: second)
    first.start_next()
    assert diary == []
    first.wait_result()
    assert diary == ["work", "gathered"]


def test_memory_of_a_peer_that_is_gone_is_a_mesh_error() -> None:
    def finish() -> None:
        raise OSError("/proc/1234/fd/5: no such file")

    with pytest.raises(MeshError, match=r"rank 0, step 0, sum"):
        Pending(watch(), "sum", [], finish).wait()


def test_a_segment_that_may_not_be_mapped_is_told_as_such() -> None:
    def finish() -> None:
        raise MappingRefused(49148, 65530)

    with pytest.raises(MeshError, match=r"vm\.max_map_count"):
        Pending(watch(), "sum", [], finish).wait()


class LateWork:
    """One that comes when it is waited for a second time."""

    def __init__(self) -> None:
        self._asked = 0

    def wait(self, timeout: object) -> None:
        self._asked += 1
        if self._asked == 1:
            raise RuntimeError("timed out")


def test_what_has_not_come_is_not_taken_for_done_when_it_is_asked_for_again() -> None:
    diary: list[str] = []
    pending = Pending(watch(), "gather", [LateWork()], lambda: diary.append("result"))
    with pytest.raises(MeshError):
        pending.wait_result()
    assert diary == []
    pending.wait_result()
    assert diary == ["result"]


def test_half_a_result_stays_an_error() -> None:
    """Made again it could be added twice: the sum may lie over what was put in."""
    diary: list[str] = []

    def finish() -> None:
        diary.append("begun")
        raise OSError("/proc/1234/fd/5: no such file")

    pending = Pending(watch(), "sum", [], finish)
    with pytest.raises(MeshError):
        pending.wait_result()
    for _ in range(2):
        with pytest.raises(MeshError, match="sum: this collective has failed before"):
            pending.wait()
    assert diary == ["begun"]


def test_one_rank_is_done_at_once() -> None:
    DONE.start_next()
    DONE.wait()
    assert DONE.received == {}


def line_pending() -> Mesh:
    """All ranks of the pool on the shard axis."""
    return build_mesh(MeshShape(shard=dist.get_world_size()))


def interleaved() -> None:
    """Several collectives under way at once, waited for in another order than they began."""
    mesh = line_pending()
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


# --- counters --------------------------------------------------------------------------------------------------------


def test_traffic_is_summed_by_kind_and_axis() -> None:
    counters = CommCounters()
    counters.add("reduce_scatter", "shard", 300, 4)
    counters.add("reduce_scatter", "shard", 100, 2)
    counters.add("all_reduce", "replica", 8, 4)
    assert counters.get("reduce_scatter", "shard") == Traffic(calls=2, elements=400, bytes=1400)
    assert counters.table() == {
        "all_reduce/replica": {"calls": 1, "elements": 8, "bytes": 32},
        "reduce_scatter/shard": {"calls": 2, "elements": 400, "bytes": 1400},
    }


def test_asking_for_what_never_happened_is_zero_and_leaves_no_trace() -> None:
    counters = CommCounters()
    assert counters.get("broadcast", "data") == Traffic()
    assert counters.table() == {}


def test_totals_are_over_axes() -> None:
    counters = CommCounters()
    counters.add("all_reduce", "shard", 1, 8)
    counters.add("all_reduce", "replica", 10, 4)
    counters.add("all_gather", "shard", 100, 4)
    assert counters.total() == Traffic(3, 111, 448)
    assert counters.total("all_reduce") == Traffic(2, 11, 48)
    assert counters.total("all_reduce", "all_gather") == Traffic(3, 111, 448)
    assert counters.total(min_elements=10) == Traffic(2, 110, 440)
    assert counters.total("send") == Traffic()


def test_reset_and_copies() -> None:
    counters = CommCounters()
    counters.add("all_reduce", "shard", 1, 8)
    table = counters.table()
    table["all_reduce/shard"]["calls"] = 7
    assert counters.get("all_reduce", "shard").calls == 1
    counters.reset()
    assert counters.total() == Traffic()


# --- messages --------------------------------------------------------------------------------------------------------


class Work_messages:
    def __init__(self, trouble: str = "") -> None:
        self._trouble = trouble

    def is_completed(self) -> bool:
        return not self._trouble

    def wait(self, timeout: object) -> None:
        if self._trouble:
            raise RuntimeError(self._trouble)


class FakeLanes:
    """Remembers what it was asked for."""

    def __init__(self, work: Work_messages) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._work = work

    def send(self, values: torch.Tensor, to: int, tag: int) -> Any:
        self.asked.append(("send", to, tag))
        return self._work

    def receive(self, values: torch.Tensor, source: int, tag: int) -> Any:
        self.asked.append(("receive", source, tag))
        return self._work


def over(work: Work_messages) -> tuple[AxisComm, FakeLanes]:
    """Axis index 0 of global ranks 4 and 6."""
    axis, lanes = AxisComm("pipe", (4, 6), 0, None, CommCounters(), Heartbeat(None, 4, 8), 0.5), FakeLanes(work)
    axis.use_ring_channels(lanes)  # type: ignore[arg-type]
    return axis, lanes


def test_a_message_through_ring_buffers() -> None:
    messages, lanes = over(Work_messages())
    values = torch.arange(3.0)
    message = messages.send(values, 1, "activations", 7)
    assert message.done
    assert message.wait() is values
    assert message.wait() is values  # again
    messages.receive(values, 1, "gradients", 8)
    assert lanes.asked == [("send", 1, 7), ("receive", 1, 8)]


def test_a_failure_names_the_two_ranks() -> None:
    messages, _ = over(Work_messages("timed out"))
    message = messages.receive(torch.empty(2), 1, "activations", 7)
    assert not message.done
    with pytest.raises(MeshError, match=r"rank 4, step 0, receive\(activations\) from rank 6: waited 0.5 s for rank 6"):
        message.wait()
