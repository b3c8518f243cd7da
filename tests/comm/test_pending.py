"""Tests for zero_trial/comm/collective.py: several under way at once, each end once, and what goes wrong in between."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import Mesh, MeshShape, build_mesh
from zero_trial.comm.backends import Received
from zero_trial.comm.collective import DONE, Pending, wait_all
from zero_trial.comm.health import Heartbeat, Watchdog
from zero_trial.comm.shm.segments import MappingRefused
from zero_trial.errors import MeshError


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


def line() -> Mesh:
    """All ranks of the pool on the shard axis."""
    return build_mesh(MeshShape(shard=dist.get_world_size()))


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
