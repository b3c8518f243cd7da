"""Exchange through shared memory has the bits of direct exchange, for every size and dtype."""

from __future__ import annotations

import random

import torch

from tests.support.pool import Pools
from zero_trial.errors import MeshError
from zero_trial.mesh import build_mesh
from zero_trial.mesh.mesh import Mesh
from zero_trial.mesh.shared_transport import WORTH_BYTES
from zero_trial.mesh.topology import MeshShape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(97 * seed + rank)).to(dtype)


def exchange(mesh: Mesh, numel: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    comm = mesh.shard
    full = values(comm.index, numel, dtype, seed)
    out = torch.empty(numel // comm.size, dtype=dtype)
    comm.reduce_scatter(full, out, "grads").wait()
    gathered = torch.full((numel,), float("nan"), dtype=dtype)
    comm.all_gather(gathered, out, "params").wait()
    total = full.clone()
    comm.all_reduce(total, "all").wait()
    return out, gathered, total


def compare(count: int) -> int:
    """Random cases on both transports; returns how many were large enough for shared memory."""
    import torch.distributed as dist

    world = dist.get_world_size()
    shared = build_mesh(MeshShape(shard=world))
    direct = build_mesh(MeshShape(shard=world), shared_memory=False)
    assert (shared.shard.transport, direct.shard.transport) == ("shared memory", "gloo")
    chance, large = random.Random(5), 0
    for seed in range(count):
        numel = world * chance.choice([1, 31, 8192, 16384, 65536, chance.randint(1, 40_000)])
        dtype = chance.choice(DTYPES)
        for ours, theirs in zip(
            exchange(shared, numel, dtype, seed), exchange(direct, numel, dtype, seed), strict=True
        ):
            assert torch.equal(ours, theirs), (numel, dtype)
        large += numel * dtype.itemsize >= WORTH_BYTES
    return large


def test_same_bits_as_direct_exchange(ranks: Pools) -> None:
    assert min(ranks(2).run(compare, 900)) > 300
    assert min(ranks(3).run(compare, 100)) > 30


def memory_after(rounds: int) -> int:
    """Segments after ``rounds`` exchanges with two under way at once."""
    import torch.distributed as dist

    from zero_trial.mesh.sharing import _MEMORIES

    mesh = build_mesh(MeshShape(shard=dist.get_world_size()))
    for _ in range(rounds):
        full = [torch.ones(1 << 16) for _ in range(2)]
        out = [torch.empty((1 << 16) // mesh.shard.size) for _ in range(2)]
        under_way = [mesh.shard.reduce_scatter(f, o, "grads") for f, o in zip(full, out, strict=True)]
        for pending in under_way:
            pending.wait(keep=True)
            assert all(bool((part == 1).all()) for part in pending.received.values())
            pending.received.release()
        mesh.shard.barrier("everyone has read")
    return sum(s.capacity for s in _MEMORIES[dist.group.WORLD].segments)


def test_memory_stops_growing(ranks: Pools) -> None:
    first = ranks(2).run(memory_after, 3)
    assert ranks(2).run(memory_after, 40) == first


def die_in_exchange() -> str:
    import os

    import torch.distributed as dist

    mesh = build_mesh(MeshShape(shard=dist.get_world_size()), timeout=20)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    try:
        mesh.shard.all_reduce(torch.ones(1 << 16), "grads").wait()
    except MeshError as error:
        return str(error)
    return "no error"


def test_a_killed_peer_is_an_error_and_leaves_nothing_behind() -> None:
    from pathlib import Path

    from tests.support.pool import RankFailed, RankPool

    before = set(Path("/dev/shm").iterdir())
    pool = RankPool(2)
    try:
        pool.run(die_in_exchange)
    except RankFailed as failed:
        assert "rank 1 of 2\nthe process died" in str(failed)
        assert "rank 0" not in str(failed).replace("rank 0 of", "")  # rank 0 got its MeshError and returned
    else:
        raise AssertionError("rank 1 was killed")
    finally:
        pool.close()
    assert {p for p in Path("/dev/shm").iterdir() if "zero_trial" in p.name} <= before
