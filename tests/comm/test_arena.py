"""Memory that ranks of one host share: ranges that are handed out and taken back, waits for peers,
and whether ranks can share at all."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.comm import mesh as probe
from zero_trial.comm.shared_memory import PAGE, Arena, PeerProcesses, map_peer
from zero_trial.errors import DoesNotFit


def pages(arena: Arena) -> int:
    """Bytes that its pages take."""
    return os.fstat(arena.descriptor).st_blocks * 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_peers_read_what_the_owner_writes(dtype: torch.dtype) -> None:
    arena = Arena(2)
    peer = map_peer(arena.process, arena.descriptor, arena.size)
    arena.tensor(3, torch.float32)
    values = arena.tensor(1000, dtype).copy_(torch.arange(1000))
    offset = arena.offset_of(values)
    assert offset is not None and torch.equal(torch.frombuffer(peer, dtype=dtype, count=1000, offset=offset), values)
    part = values[10:20]
    place = arena.offset_of(part)
    assert place == offset + 10 * dtype.itemsize and torch.equal(
        torch.frombuffer(peer, dtype=dtype, count=10, offset=place), part
    )
    assert arena.offset_of(torch.zeros(3)) is None and arena.offset_of(arena.tensor(0, dtype)) is None


def test_a_range_is_free_when_the_last_view_is_gone() -> None:
    arena = Arena(2)
    first, second = arena.tensor(1 << 14, torch.float32), arena.tensor(1 << 14, torch.float32)
    place, view = first.data_ptr(), first[5:]
    del first
    third = arena.tensor(1 << 14, torch.float32)
    assert third.data_ptr() != place
    del third
    assert arena.in_use == 2 << 16
    del view
    assert arena.in_use == 1 << 16
    third = arena.tensor(1 << 14, torch.float32)
    assert third.data_ptr() == place, "the first range that is large enough"
    del second, third
    assert arena.in_use == 0


def test_neighbors_become_one_range() -> None:
    arena = Arena(2)
    made = [arena.tensor(PAGE, torch.uint8) for _ in range(5)]
    for index in (1, 3, 2, 0, 4):
        made[index] = torch.empty(0)
        assert arena.in_use == PAGE * sum(each.numel() > 0 for each in made)
    assert arena._free == [(0, arena.size)]


def test_pages_of_free_ranges_go_where_asked() -> None:
    arena = Arena(2)
    stays, goes = arena.tensor(1 << 18, torch.float32).fill_(3.0), arena.tensor(1 << 18, torch.float32).fill_(4.0)
    between = arena.tensor(PAGE, torch.uint8)
    del goes
    assert pages(arena) >= 2 << 20
    arena.trim()
    assert pages(arena) == (1 << 20) + PAGE and stays.eq(3).all()
    assert arena.tensor(1 << 18, torch.float32).fill_(5.0).eq(5).all() and between.numel() == PAGE


def test_a_forked_child_leaves_its_parents_pages_alone() -> None:
    arena = Arena(2)
    values = arena.tensor(1 << 18, torch.float32).fill_(3.0)
    child = os.fork()
    if child == 0:
        del values
        arena.trim()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and values.eq(3).all()


def test_a_host_without_memory_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(2)
    with pytest.raises(DoesNotFit, match=r"shared memory: the host has no memory left .* got .* bytes more"):
        arena.tensor(arena.size, torch.uint8)

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DoesNotFit, match="No space left on device"):
        arena.tensor(5, torch.uint8)


def number(value: int = 0) -> memoryview:
    return memoryview(bytearray(value.to_bytes(8, "little"))).cast("q")


def test_other_collectives_go_on_in_the_meantime() -> None:
    numbers = number()
    PeerProcesses({1: os.getpid()}, go_on=lambda: numbers.__setitem__(0, 7)).wait_for(1, numbers, 0, 7, 30.0)


def test_gives_up_in_time() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        PeerProcesses({1: os.getpid()}).wait_for(1, number(6), 0, 7, 0.05)


def test_a_killed_process_is_noticed_before_its_status_is_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = PeerProcesses({1: child.pid})
    os.kill(child.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="closed: the process of axis index 1"):
        peers.wait_for(1, number(), 0, 1, 60.0)
    assert time.monotonic() - begun < 30, "long before the timeout"
    child.communicate()


@contextmanager
def no_hosts() -> Iterator[pytest.MonkeyPatch]:
    """Inside, this process knows no peers; it knows its own again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_HOSTS", {})
        yield patch


def transports(blind_rank: int | None) -> dict[str, str]:
    """One rank may be made unable to read the others' memory, as if it were in another
    container."""
    with no_hosts() as patch:
        if dist.get_rank() == blind_rank:
            patch.setattr(probe, "_open_axis", lambda *_: None)
        mesh = build_mesh(MeshShape(shard=dist.get_world_size()))
    return {"shard": mesh.shard.transport_name, "replica": mesh.replica.transport_name}


def test_one_rank_that_cannot_read_keeps_all_from_sharing(ranks: Pools) -> None:
    assert ranks(2).run(transports, 1) == [{"shard": "gloo", "replica": "gloo"}] * 2


def open_after_each_world() -> list[int]:
    """The descriptors of arenas and processes that are open after worlds of one process, whose
    ranks have exchanged tensors through copies and in place."""
    found = []
    for _ in range(4):
        with no_hosts():
            mesh = build_mesh(MeshShape(shard=2))
            here = torch.device("cpu")
            for full in (mesh.shard.buffer(1 << 14, torch.float32, here), torch.zeros(1 << 14)):
                own = torch.zeros(1 << 13)
                mesh.shard.reduce_scatter(full, own, "sums").wait()
                mesh.shard.all_gather(full, own, "parts").wait()
            del mesh, full, own
        gc.collect()
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        found.append(sum("memfd:" in link or "pidfd" in link for link in links))
    return found


def test_a_world_that_has_ended_leaves_no_descriptors(ranks: Pools) -> None:
    for found in ranks(2).run(open_after_each_world):
        assert len(set(found)) == 1, found


def test_another_number_at_that_place_is_another_host(ranks: Pools) -> None:
    assert ranks(2).run(other_secret) == ["gloo"] * 2


def other_secret() -> str:
    mesh = build_mesh(MeshShape(shard=2), shared_memory=False)
    gather = mesh.shard.gather_json
    mesh.shard.gather_json = (
        lambda value, label: [  # type: ignore[method-assign]
            [*row[:4], row[4] + 1] if label == "can memory be shared?" else row for row in gather(value, label)
        ]
    )
    with no_hosts():
        probe.share_memory_if_possible(mesh.shard)
    return mesh.shard.transport_name
