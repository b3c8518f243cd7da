"""A few numbers or a little JSON of all ranks: through shared memory, and by the
backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.errors import MeshError

SMALL = 4096  # bytes of a page


def small_values(shared: bool) -> list[object]:
    world, rank = dist.get_world_size(), dist.get_rank()
    comm = build_mesh(MeshShape(shard=world), shared_memory=shared).shard
    assert (comm.transport_name == "shared memory") is shared
    found: list[object] = []
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bfloat16):
        for op in ("sum", "max", "min"):
            values = torch.tensor([[rank + 1.0, -rank], [3.0, rank * rank]]).to(dtype)
            comm.all_reduce_small(values, "few", op)
            found.append(values.tolist())
    sizes = (1, SMALL // 8, SMALL // 8 + 1, 300_000)
    for size in sizes:
        values = torch.full((size,), float(rank), dtype=torch.float64)
        comm.broadcast(values, "values", source=world - 1)
        found.append(bool((values == world - 1).all()))
        comm.all_reduce_small(values, "all of them")
        found.append(bool((values == world * (world - 1)).all()))
    found.append(comm.gather_json({"rank": rank}, "who"))
    found.append([len(text) for text in comm.gather_json("x" * (1 + rank * SMALL), "long")])
    comm.barrier("end")
    return found


@pytest.mark.parametrize(("world", "shared"), [(2, True), (3, True), (3, False)])
def test_every_verb_on_either_side_of_the_limit(ranks: Pools, world: int, shared: bool) -> None:
    answers = ranks(world).run(small_values, shared)
    assert all(answer == answers[0] for answer in answers)
    total = float(sum(range(1, world + 1)))
    assert answers[0][0] == [[total, -float(sum(range(world)))], [3.0 * world, float(sum(r * r for r in range(world)))]]
    assert all(answers[0][12:20])
    assert answers[0][20] == [{"rank": rank} for rank in range(world)]
    assert answers[0][21] == [1 + rank * SMALL for rank in range(world)]


def one_goes_elsewhere() -> str:
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
    assert all("disagree about the next collective" in text or "gave up" in text for text in texts), texts
