"""Collectives among ranks that are not there."""

from __future__ import annotations

import pytest
import torch

from zero_trial.comm import MeshShape
from zero_trial.planning.fake_comm import Exchange, Segments, fake_mesh
from zero_trial.planning.live_bytes import LiveBytes

BIG = 1 << 14  # elements: more than what goes by message


def test_the_place_is_rank_0_of_the_shape() -> None:
    mesh = fake_mesh(MeshShape(pipe=2, replica=3, shard=4))
    assert (mesh.shard.size, mesh.shard.index, mesh.replica.size, mesh.data.size, mesh.world.size) == (4, 0, 3, 12, 24)
    assert mesh.world.gather_json("x", "names") == ["x"] * 24
    mesh.world.barrier("no one waits")


def test_control_values_of_other_ranks_are_this_ones() -> None:
    axis, values = fake_mesh(MeshShape(shard=4)).shard, torch.tensor([1.0, 2.5])
    for op, expected in (("max", [1.0, 2.5]), ("min", [1.0, 2.5]), ("sum", [4.0, 10.0])):
        axis.all_reduce_small(values, "norm", op)
        assert values.tolist() == expected


@pytest.mark.parametrize("exchange", list(Exchange))
def test_results_are_this_ranks_own_and_zeros(exchange: Exchange) -> None:
    shard = fake_mesh(MeshShape(shard=2), exchange).shard
    full = torch.arange(1.0, BIG + 1)
    out = torch.empty(BIG // 2)
    shard.reduce_scatter(full, out, "gradients").wait()
    assert torch.equal(out, full[: BIG // 2])
    whole = torch.full((BIG,), torch.nan)
    shard.all_gather(whole, out, "parameters").wait()
    assert torch.equal(whole[: BIG // 2], out) and not whole[BIG // 2 :].any()
    shard.all_reduce(full, "replicas").wait()
    assert torch.equal(full, torch.arange(1.0, BIG + 1))


@pytest.mark.parametrize(
    ("exchange", "numel", "ranks", "held"),
    [
        (Exchange.DIRECT, BIG, 2, BIG // 2),
        (Exchange.DIRECT, BIG, 4, 3 * BIG // 4),
        (Exchange.NATIVE, BIG, 4, 0),
        (Exchange.SHARED, BIG, 4, 0),
        (Exchange.SHARED, 1024, 2, 0),  # small payloads, too
    ],
)
def test_what_a_reduction_holds_until_its_sum_is_made(exchange: Exchange, numel: int, ranks: int, held: int) -> None:
    shard = fake_mesh(MeshShape(shard=ranks), exchange).shard
    full, out = torch.zeros(numel), torch.zeros(numel // ranks)
    with LiveBytes() as live:
        pending = shard.reduce_scatter(full, out, "gradients")
        assert live.live == 4 * held
        pending.wait()
        pending.received.release()
        del pending
        assert live.live == 0


def test_segments_stay_and_are_used_again() -> None:
    segments = Segments()
    shard = fake_mesh(MeshShape(shard=2), Exchange.SHARED, segments).shard
    full, out = torch.zeros(BIG), torch.zeros(BIG // 2)
    first, second = (shard.reduce_scatter(full, out, name) for name in "ab")
    one = 4 * BIG // 2
    assert segments.total == 2 * (max(one, 1 << 16) + 4096)  # two in flight: two segments
    for pending in (first, second):
        pending.wait()
        pending.received.release()
    shard.all_gather(full, out, "c").wait()
    assert len(segments.made) == 2


@pytest.mark.parametrize(("exchange", "in_place"), [(Exchange.SHARED, True), (Exchange.DIRECT, False)])
def test_what_is_read_in_place_needs_no_segment(exchange: Exchange, in_place: bool) -> None:
    segments, cpu = Segments(), torch.device("cpu")
    shard = fake_mesh(MeshShape(shard=2), exchange, segments).shard
    assert shard.reads_in_place(cpu) is in_place
    full, out = shard.buffer(BIG, torch.float32, cpu), torch.zeros(BIG // 2)
    shard.reduce_scatter(full, out, "gradients").wait()
    shard.all_gather(full, full[: BIG // 2], "parameters").wait()
    shard.all_reduce(full[BIG // 2 :], "replicas").wait()
    assert segments.total == 0 and not shard.has_readers(full)
    shard.all_gather(full, out, "from elsewhere").wait()
    assert (segments.total > 0) is in_place


def test_an_axis_of_one_rank_copies() -> None:
    comm = fake_mesh(MeshShape()).shard
    out = torch.zeros(4)
    comm.reduce_scatter(torch.ones(4), out, "x").wait()
    assert out.tolist() == [1.0] * 4
    comm.all_gather(out, out, "x").wait()
    comm.all_reduce(out, "x").wait()
    assert out.tolist() == [1.0] * 4
