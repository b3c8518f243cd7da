"""Collectives through arenas: several under way, and peers that are late, in another call, or
killed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools, RankFailed, RankPool
from zero_trial.comm import build_mesh
from zero_trial.comm.backends import ARRIVED, SLOTS, Call, CallBoard
from zero_trial.comm.mesh import _HOSTS, MeshShape
from zero_trial.comm.shared_memory import PeerProcesses
from zero_trial.errors import MeshError

CPU, META = torch.device("cpu"), torch.device("meta")


def several_of_one_buffer() -> None:
    """Parts of one buffer are reduced, and waited for in another order on each rank."""
    comm = build_mesh(MeshShape(shard=dist.get_world_size())).shard
    buffer = comm.buffer(comm.size * 640, torch.float32, CPU)
    buffer.copy_(torch.arange(buffer.numel()))
    outs = [torch.empty(64) for _ in range(10)]
    chunks = buffer.view(10, -1)
    under_way = [comm.reduce_scatter(chunk, out, "part") for chunk, out in zip(chunks, outs, strict=True)]
    for pending in reversed(under_way) if comm.index else under_way:
        pending.wait()
    for chunk, out in zip(chunks, outs, strict=True):
        assert torch.equal(out, comm.size * chunk.view(comm.size, -1)[comm.index])


def test_several_collectives_of_one_buffer(ranks: Pools) -> None:
    ranks(2).run(several_of_one_buffer)
    ranks(3).run(several_of_one_buffer)


def lag() -> float:
    """Rank 1 reads late: seconds for which rank 0 waits."""
    patch = pytest.MonkeyPatch()
    if dist.get_rank():
        patch.setattr(Call, "is_completed", lambda self: False)
    comm = build_mesh(MeshShape(shard=2)).shard
    shard = comm.buffer(8, torch.float32, CPU).fill_(float(comm.index))
    full = torch.empty(16)
    pending = comm.all_gather(full, shard, "params")
    if comm.index:
        time.sleep(0.3)
    patch.undo()
    begun = time.monotonic()
    pending.wait()
    shard.fill_(float("nan"))
    assert full.tolist() == [0.0] * 8 + [1.0] * 8
    return time.monotonic() - begun


def test_a_collective_is_over_when_peers_have_read(ranks: Pools) -> None:
    assert ranks(2).run(lag)[0] > 0.2


def crossed_waits() -> list[float]:
    """Each rank waits for another collective first, on another axis: both go on with all of
    theirs."""
    mesh = build_mesh(MeshShape(shard=2))
    first, second = torch.ones(64), torch.ones(64)
    pendings = [mesh.shard.all_reduce(first, "one"), mesh.data.all_reduce(second, "two")]
    for pending in pendings[:: 1 if mesh.rank else -1]:
        pending.wait()
    return [float(first.sum()), float(second.sum())]


def test_ranks_may_wait_in_different_orders(ranks: Pools) -> None:
    assert ranks(2).run(crossed_waits) == [[128.0, 128.0]] * 2


def not_waited_for(rounds: int) -> tuple[float, int]:
    """Collectives that no rank waits for are over all the same, and leave their memory."""
    comm = build_mesh(MeshShape(shard=2)).shard
    last = torch.empty(0)
    for number in range(rounds):
        last = torch.full((64,), float(number))
        comm.all_reduce(last, "sum")
    comm.barrier("all have started")
    host = _HOSTS[dist.group.WORLD]
    while host.under_way._pendings:
        host.under_way.go_on()
    assert host.arena is not None
    return float(last[0]), host.arena.in_use


def test_one_that_no_rank_waits_for_holds_no_rank_up(ranks: Pools) -> None:
    few, many = ranks(2).run(not_waited_for, 10), ranks(2).run(not_waited_for, 3 * SLOTS)
    assert [value for value, _ in many] == [2.0 * (3 * SLOTS - 1)] * 2
    # the first run may still hold buffers of the test before
    assert all(after <= before for (_, after), (_, before) in zip(many, few, strict=True))


def die_in_exchange(after_start: bool) -> str:
    """Rank 1 is killed before it starts a collective, or when it has started and not read."""
    mesh = build_mesh(MeshShape(shard=dist.get_world_size()), timeout=20)
    gradients = mesh.shard.buffer(1 << 16, torch.float32, CPU).zero_()
    mesh.shard.all_reduce(gradients, "grads").wait()
    out = torch.empty(gradients.numel() // mesh.shard.size)
    if dist.get_rank() == 1 and not after_start:
        os.kill(os.getpid(), 9)
    pending = mesh.shard.reduce_scatter(gradients, out, "grads")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    try:
        pending.wait()
    except MeshError as error:
        return str(error)
    raise AssertionError("rank 1 was killed")


@pytest.mark.parametrize("after_start", [False, True])
def test_a_killed_peer_is_an_error_and_leaves_nothing_behind(after_start: bool) -> None:
    before = set(Path("/dev/shm").iterdir())
    pool = RankPool(2)
    try:
        pool.run(die_in_exchange, after_start)
    except RankFailed as failed:
        assert "rank 1 of 2\nthe process died" in str(failed)
        # rank 0 got its MeshError and returned
        assert "rank 0" not in str(failed).replace("rank 0 of", "")
    else:
        raise AssertionError("rank 1 was killed")
    finally:
        pool.close()
    assert {p for p in Path("/dev/shm").iterdir() if "zero_trial" in p.name} <= before


def place_of_a_buffer() -> tuple[bool, bool, bool]:
    comm, arena = build_mesh(MeshShape(shard=2)).shard, _HOSTS[dist.group.WORLD].arena
    made = comm.buffer(5, torch.bfloat16, CPU)
    assert arena is not None and made.dtype is torch.bfloat16
    return arena.offset_of(made) is not None, comm.shares_memory(CPU), comm.shares_memory(META)


def test_a_buffer_is_where_peers_read_it(ranks: Pools) -> None:
    assert ranks(2).run(place_of_a_buffer) == [(True, True, False)] * 2


def test_a_peer_in_another_collective_is_an_error() -> None:
    blocks = [memoryview(bytearray(CallBoard.NBYTES)) for _ in range(2)]
    peers = PeerProcesses({1: os.getpid()})
    left, right = CallBoard(blocks[0], {1: blocks[1]}, peers), CallBoard(blocks[1], {0: blocks[0]}, peers)
    here, there = Call(left, 5, torch.empty(0), 0), Call(right, 6, torch.empty(0), 0)
    here.reach(ARRIVED)
    there.reach(ARRIVED)
    assert not here.is_completed()
    with pytest.raises(RuntimeError, match="another operation"):
        here.wait(timedelta(seconds=30))
