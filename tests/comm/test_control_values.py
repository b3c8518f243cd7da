"""A few numbers or a little JSON of all ranks: through a block of shared memory, and by the
backend."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import Mesh, MeshShape, build_mesh
from zero_trial.comm.shared_memory import CONTROL_CAPACITY, PeerProcesses, SharedControlBlock
from zero_trial.errors import MeshError


def line(shared: bool = True) -> Mesh:
    """All ranks of the pool on the shard axis."""
    return build_mesh(MeshShape(shard=dist.get_world_size()), shared_memory=shared)


def json_values(shared: bool) -> None:
    mesh = line(shared)
    mine = {"rank": mesh.rank, "text": "ä\n" * mesh.rank, "list": [None, 1.5, True]}
    everyone = mesh.shard.gather_json(mine, "facts")
    assert [value["rank"] for value in everyone] == list(range(mesh.shard.size))
    assert everyone[mesh.rank] == mine
    assert everyone[-1]["text"] == "ä\n" * (mesh.shard.size - 1)
    assert mesh.shard.gather_json(None, "nothing") == [None] * mesh.shard.size


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_gather_json(ranks: Pools, world: int, shared: bool) -> None:
    ranks(world).run(json_values, shared)


def small_numbers(shared: bool) -> None:
    shard = line(shared).shard
    for op, expected in (("sum", sum(range(shard.size))), ("max", shard.size - 1), ("min", 0)):
        value = torch.tensor([float(shard.index)], dtype=torch.float64)
        shard.all_reduce_small(value, "norm", op)
        assert value.item() == expected
    bad = torch.tensor([float("nan") if shard.index == 1 else 1.0])
    shard.all_reduce_small(bad, "norm")
    assert bad.isnan().all()


@pytest.mark.parametrize("shared", [True, False])
def test_small_reductions(ranks: Pools, shared: bool) -> None:
    ranks(3).run(small_numbers, shared)


# --- the shared block -----------------------------------------------------------------------------


def pair() -> tuple[SharedControlBlock, SharedControlBlock]:
    """Two ends in one process."""
    blocks = [memoryview(bytearray(SharedControlBlock.NBYTES)) for _ in range(2)]

    def end(own: int, other: int) -> SharedControlBlock:
        return SharedControlBlock(blocks[own], {other: blocks[other]}, PeerProcesses({other: os.getpid()}))

    return end(0, 1), end(1, 0)


def test_payloads_cross_many_times_over() -> None:
    left, right = pair()
    received: list[bytes] = []

    def other() -> None:
        for number in range(500):
            received.append(right.exchange("sum", number.to_bytes(8, "little"), 10.0)[0])

    thread = threading.Thread(target=other)
    thread.start()
    for number in range(500):
        payload = (1000 + number).to_bytes(8, "little")
        assert left.exchange("sum", payload, 10.0)[1] == number.to_bytes(8, "little")
    thread.join()
    assert received == [(1000 + number).to_bytes(8, "little") for number in range(500)]


@pytest.mark.parametrize(("name", "payload"), [("barrier", b"12345678"), ("sum", b"1234")])
def test_ranks_that_disagree_get_an_error(name: str, payload: bytes) -> None:
    left, right = pair()

    def other() -> None:
        with pytest.raises(RuntimeError, match="another operation"):
            right.exchange(name, payload, 10.0)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError, match="another operation"):
        left.exchange("sum", b"12345678", 10.0)
    thread.join()


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    left, _ = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        left.exchange("sum", b"", 0.1)


def small_values() -> list[object]:
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = build_mesh(MeshShape(shard=world))
    comm = mesh.shard
    assert comm._shared is not None
    found: list[object] = []
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bfloat16):
        for op in ("sum", "max", "min"):
            values = torch.tensor([[rank + 1.0, -rank], [3.0, rank * rank]]).to(dtype)
            comm.all_reduce_small(values, "few", op)
            found.append(values.tolist())
    sizes = (1, CONTROL_CAPACITY // 8, CONTROL_CAPACITY // 8 + 1, 300_000)
    for size in sizes:
        values = torch.full((size,), float(rank), dtype=torch.float64)
        comm.broadcast(values, "values", source=world - 1)
        found.append(bool((values == world - 1).all()))
        comm.all_reduce_small(values, "all of them")
        found.append(bool((values == world * (world - 1)).all()))
    found.append(comm.gather_json({"rank": rank}, "who"))
    found.append([len(text) for text in comm.gather_json("x" * (1 + rank * CONTROL_CAPACITY), "long")])
    comm.barrier("end")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_verb_on_either_side_of_the_limit(ranks: Pools, world: int) -> None:
    answers = ranks(world).run(small_values)
    assert all(answer == answers[0] for answer in answers)
    total = float(sum(range(1, world + 1)))
    assert answers[0][0] == [[total, -float(sum(range(world)))], [3.0 * world, float(sum(r * r for r in range(world)))]]
    assert all(answers[0][12:20])
    assert answers[0][20] == [{"rank": rank} for rank in range(world)]
    assert answers[0][21] == [1 + rank * CONTROL_CAPACITY for rank in range(world)]


def one_goes_elsewhere() -> str:
    import torch.distributed as dist

    mesh = build_mesh(MeshShape(shard=dist.get_world_size()), timeout=5.0)
    name = "norm" if dist.get_rank() == 0 else "loss"
    try:
        mesh.shard.all_reduce_small(torch.zeros(1), name)
    except MeshError as error:
        return str(error)
    return ""


def test_ranks_at_different_operations_get_an_error_at_once() -> None:
    pools = Pools()
    try:
        texts = pools(2).run(one_goes_elsewhere)
    finally:
        pools.close()
    assert all("disagree about what comes next" in text or "gave up" in text for text in texts), texts
