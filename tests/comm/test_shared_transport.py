"""Exchange through shared memory has the bits of direct exchange, for every size and dtype."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, build_mesh
from zero_trial.comm.mesh import Mesh, MeshShape
from zero_trial.errors import MeshError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(97 * seed + rank)).to(dtype)


# Where a tensor is put before a collective gets it.
Put = Callable[[torch.Tensor], torch.Tensor]


class Places:
    """Puts about two of three tensors into buffers that peers read in place, at any element of them; every rank chooses for itself."""

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


def exchange(mesh: Mesh, numel: int, dtype: torch.dtype, seed: int, put: Put) -> list[torch.Tensor]:
    """A reduction's result, and that of one other collective. Inputs are scribbled over as soon as they are this rank's again."""
    comm = mesh.shard
    own = values(comm.index, numel, dtype, seed)
    out, full = torch.empty(numel // comm.size, dtype=dtype), put(own)
    comm.reduce_scatter(full, out, "grads").wait()
    assert torch.equal(full, own)
    full.fill_(float("nan"))
    whole = put(own)
    if seed % 4 == 0:
        gathered, shard = torch.full((numel,), float("nan"), dtype=dtype), put(out)
        comm.all_gather(gathered, shard, "params").wait()
        shard.fill_(float("nan"))
        return [out, gathered]
    if seed % 4 == 1:
        comm.all_reduce(whole, "all").wait()
    elif seed % 4 == 2:
        comm.broadcast(whole, "told", source=seed % comm.size)
    else:
        part = whole.view(comm.size, -1)[comm.index]
        comm.reduce_scatter(whole, part, "in place").wait()
    result = whole.clone()
    whole.fill_(float("nan"))
    return [out, result]


def compare(count: int) -> int:
    """Random cases on both transports; returns how many tensors were read in place."""
    import torch.distributed as dist

    world = dist.get_world_size()
    shared = build_mesh(MeshShape(shard=world))
    direct = build_mesh(MeshShape(shard=world), shared_memory=False)
    assert (shared.shard.transport, direct.shard.transport) == ("shared memory", "gloo")
    assert shared.shard.reads_in_place(torch.device("cpu")) and not direct.shard.reads_in_place(torch.device("cpu"))
    chance, put = random.Random(5), Places(shared.shard, world * 65536)
    for seed in range(count):
        numel = world * chance.choice([1, 31, 8192, 16384, 65536, chance.randint(1, 40_000)])
        dtype = chance.choice(DTYPES)
        ours = exchange(shared, numel, dtype, seed, put)
        theirs = exchange(direct, numel, dtype, seed, torch.clone)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other), (numel, dtype)
    return put.used


def test_same_bits_as_direct_exchange_wherever_tensors_lie(ranks: Pools) -> None:
    assert min(ranks(2).run(compare, 900)) > 1000
    assert min(ranks(3).run(compare, 80)) > 80
    assert min(ranks(4).run(compare, 20)) > 20


def several_of_one_buffer() -> None:
    """A buffer is lent to one collective; a second one under way copies out its part. Neither start waits for anybody."""
    import torch.distributed as dist

    comm = build_mesh(MeshShape(shard=dist.get_world_size())).shard
    buffer = comm.buffer(comm.size * 640, torch.float32, torch.device("cpu"))
    buffer.copy_(torch.arange(buffer.numel()))
    outs = [torch.empty(64) for _ in range(10)]
    chunks = buffer.view(10, -1)
    under_way = [comm.reduce_scatter(chunk, out, "part") for chunk, out in zip(chunks, outs, strict=True)]
    for pending in reversed(under_way):
        pending.wait_result()
    comm.wait_for_readers(buffer)
    assert not comm.has_readers(buffer)
    for chunk, out in zip(chunks, outs, strict=True):
        assert torch.equal(out, comm.size * chunk.view(comm.size, -1)[comm.index])


def test_several_collectives_of_one_buffer(ranks: Pools) -> None:
    ranks(2).run(several_of_one_buffer)
    ranks(3).run(several_of_one_buffer)


def lag() -> tuple[bool, bool]:
    """Rank 1 arrives late: rank 0 has its result, and is told that its buffer is still being read."""

    mesh = build_mesh(MeshShape(shard=2))
    comm = mesh.shard
    shard = comm.buffer(8, torch.float32, torch.device("cpu")).fill_(float(comm.index))
    full = torch.empty(16)
    pending = comm.all_gather(full, shard, "params")
    if comm.index == 0:
        pending.wait_result()
        early = not comm.has_readers(shard)
        comm.barrier("rank 0 has arrived")
    else:
        early = False
        comm.barrier("rank 0 has arrived")
    pending.wait()
    assert full.tolist() == [0.0] * 8 + [1.0] * 8
    return early, not comm.has_readers(shard)


def test_a_result_is_there_before_peers_have_read(ranks: Pools) -> None:
    assert ranks(2).run(lag) == [(False, True)] * 2


def memory_after(rounds: int) -> int:
    """Segments after ``rounds`` exchanges with two under way at once."""
    import torch.distributed as dist

    from zero_trial.comm.shm.probe import _MEMORIES

    mesh = build_mesh(MeshShape(shard=dist.get_world_size()))
    for _ in range(rounds):
        full = [torch.ones(1 << 16) for _ in range(2)]
        out = [torch.empty((1 << 16) // mesh.shard.size) for _ in range(2)]
        under_way = [mesh.shard.reduce_scatter(f, o, "grads") for f, o in zip(full, out, strict=True)]
        for pending in under_way:
            pending.wait_result(keep=True)
            assert all(bool((part == 1).all()) for part in pending.received.values())
            pending.received.release()
        mesh.shard.barrier("everyone has read")
    return sum(s.capacity for s in _MEMORIES[dist.group.WORLD].segments)


def test_memory_stops_growing(ranks: Pools) -> None:
    first = ranks(2).run(memory_after, 3)
    assert ranks(2).run(memory_after, 40) == first


def die_in_exchange(after_start: bool) -> str:
    """Rank 1 is killed before it starts an exchange, or when its own part is told and it has not read the others'."""
    import os

    import torch.distributed as dist

    mesh = build_mesh(MeshShape(shard=dist.get_world_size()), timeout=20)
    gradients = mesh.shard.buffer(1 << 16, torch.float32, torch.device("cpu"))
    mesh.shard.all_reduce(gradients, "grads").wait()  # so that memory is mapped already
    out = torch.empty(gradients.numel() // mesh.shard.size)
    if dist.get_rank() == 1 and not after_start:
        os.kill(os.getpid(), 9)
    pending = mesh.shard.reduce_scatter(gradients, out, "grads")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    try:
        pending.wait_result()
    except MeshError as error:
        assert not after_start
        return str(error)
    assert after_start
    try:
        pending.wait()
    except MeshError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("after_start", [False, True])
def test_a_killed_peer_is_an_error_and_leaves_nothing_behind(after_start: bool) -> None:
    from tests.support.pool import RankFailed, RankPool

    before = set(Path("/dev/shm").iterdir())
    pool = RankPool(2)
    try:
        pool.run(die_in_exchange, after_start)
    except RankFailed as failed:
        assert "rank 1 of 2\nthe process died" in str(failed)
        assert "rank 0" not in str(failed).replace("rank 0 of", "")  # rank 0 got its MeshError and returned
    else:
        raise AssertionError("rank 1 was killed")
    finally:
        pool.close()
    assert {p for p in Path("/dev/shm").iterdir() if "zero_trial" in p.name} <= before
