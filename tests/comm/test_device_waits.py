"""The mesh over a backend as strict as NCCL: who waits for a collective is decided by where its tensors are, not by the group's name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support import strict_backend
from tests.support.pool import RankPool
from zero_trial.comm import AxisComm, MeshShape, agree_on, build_mesh, open_direction_groups


@pytest.fixture(scope="module")
def strict() -> Iterator[RankPool]:
    pool = RankPool(2, strict=True)
    yield pool
    pool.close()


def line() -> AxisComm:
    return build_mesh(MeshShape(shard=dist.get_world_size()), shared_memory=False).shard


def device_collectives() -> tuple[list[str], list[str], list[list[float]]]:
    with strict_backend.pretended_device():
        shard = line()
        strict_backend.host_waits.clear()
        strict_backend.launched.clear()
        full, part = torch.arange(4.0) + shard.index, torch.empty(2)
        norm, message = torch.ones(1, dtype=torch.float64), torch.full((3,), float(shard.index))
        shard.reduce_scatter(full, part, "gradients").wait()
        shard.all_gather(full, part, "parameters").wait()
        shard.all_reduce(full, "replicas").wait()
        shard.all_reduce_small(norm, "norm")
        if shard.index == 0:
            shard.send(message, 1, "activation", 7).wait()
        else:
            shard.receive(message, 0, "activation", 7).wait()
        return (
            strict_backend.host_waits,
            strict_backend.launched,
            [part.tolist(), full.tolist(), norm.tolist(), message.tolist()],
        )


def test_the_host_waits_for_no_collective_of_device_tensors(strict: RankPool) -> None:
    answers = strict.run(device_collectives)
    assert [answer[0] for answer in answers] == [[], []]
    assert [answer[1][:5] for answer in answers] == [
        ["reduce_scatter", "all_gather", "reduce_scatter", "all_gather", "all_reduce"]
    ] * 2
    total = [2.0, 6.0, 10.0, 14.0]
    assert [answer[2] for answer in answers] == [
        [[1.0, 3.0], total, [2.0], [0.0] * 3],
        [[5.0, 7.0], total, [2.0], [0.0] * 3],
    ]


def control_values() -> tuple[int, list[int], list[float], int, list[str]]:
    with strict_backend.pretended_device():
        shard = line()
        strict_backend.host_waits.clear()
        found = shard.gather_json(shard.index, "facts")
        waited = len(strict_backend.host_waits)
        shard.barrier("end")
        return waited, found, agree_on([2.5 + shard.index]), len(strict_backend.host_waits), strict_backend.launched


def test_control_values_stay_on_the_host(strict: RankPool) -> None:
    for waited, found, agreed, _, _ in strict.run(control_values):
        assert waited == 2  # the lengths, and the values
        assert found == [0, 1]
        assert agreed == [2.5]


def timeouts_of_groups() -> list[float]:
    size = dist.get_world_size()
    found = []
    for seconds in (7.0, 9.0):  # a second engine of the process with another limit
        mesh = build_mesh(MeshShape(pipe=size // 2, shard=2), timeout=seconds, shared_memory=False)
        open_direction_groups(mesh, [(0, 1)])
        groups = [mesh.shard.group, *mesh.pipe.directions.values()]
        found += [group.timeout.total_seconds() for group in groups]
        assert build_mesh(mesh.shape, timeout=seconds, shared_memory=False).shard.group is mesh.shard.group
    return found


def test_the_groups_of_an_axis_have_the_timeout_of_the_mesh() -> None:
    pool = RankPool(4, strict=True)
    try:
        assert pool.run(timeouts_of_groups) == [[7.0, 7.0, 9.0, 9.0]] * 4
    finally:
        pool.close()


def launch_order() -> list[bool]:
    with strict_backend.pretended_device():
        works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(8)]
        works[-1].wait()
        return [work.is_completed() for work in works]


def test_works_complete_in_the_order_of_their_launches(strict: RankPool) -> None:
    assert strict.run(launch_order) == [[True] * 8] * 2


def mixed() -> list[str]:
    found = []
    with strict_backend.pretended_device():
        for output, whole in (
            (torch.zeros(2), torch.zeros(4, dtype=torch.int64)),
            (torch.zeros(1, dtype=torch.int64),) * 2,
        ):
            with pytest.raises(RuntimeError) as caught:
                strict_backend.StrictGroup._reduce_scatter_base(dist.group.WORLD, output, whole)
            found.append(str(caught.value))
    return found


def test_a_tensor_of_the_wrong_device_is_refused(strict: RankPool) -> None:
    for first, second in strict.run(mixed):
        assert "torch.int64 on the host" in first
        assert "on the host, torch.int64" in second


def test_where_a_tensor_is():
    assert AxisComm.on_host(torch.zeros(1))
    assert not AxisComm.on_host(torch.zeros(1, device="meta"))
