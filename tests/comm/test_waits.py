"""What is under way and who waits for it: the phases of a collective, and the host next to a device
that makes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.device import device
from tests.support.pool import Pools
from zero_trial.comm import AxisComm, CommCounters, MeshShape, agree_on, build_mesh, open_direction_groups
from zero_trial.comm.backends import Steps
from zero_trial.comm.waits import Heartbeat, Pending, UnderWay, Watchdog
from zero_trial.errors import MeshError, WorkerLost


class Work:
    """One that says when it is waited for, and is done then."""

    def __init__(self, diary: list[str], trouble: str = "") -> None:
        self._diary = diary
        self._trouble = trouble
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: object) -> None:
        if self._trouble:
            raise RuntimeError(self._trouble)
        self._diary.append("work")
        self.done = True


def watch() -> Watchdog:
    return Watchdog(Heartbeat(None, 0, 1), (0, 1), 1.0)


def two_phases(diary: list[str], *works: Work) -> Steps:
    for work in works:
        yield [work]
        diary.append("result")


def test_each_phase_is_waited_for() -> None:
    diary: list[str] = []
    pending = Pending(watch(), "sum", two_phases(diary, Work(diary), Work(diary)))
    assert diary == [] and not pending.go_on()
    pending.wait()
    pending.wait()  # again: allowed, and nothing happens
    assert diary == ["work", "result", "work", "result"] and pending.go_on()


def test_what_is_ready_goes_on_while_another_is_waited_for() -> None:
    diary: list[str] = []
    under_way, works = UnderWay(), [Work(diary), Work(diary)]
    pending = Pending(watch(), "sum", two_phases(diary, *works))
    under_way.add(pending)
    assert diary == []
    works[0].done = True
    under_way.go_on()
    assert diary == ["result"]
    under_way.wait_for_oldest()
    assert diary == ["result", "work", "result"] and pending.go_on()


def test_a_dead_worker_of_a_loader_is_not_a_fault_of_the_collective() -> None:
    """torch raises it in the main thread, wherever that is."""
    work = Work([], "DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(
        WorkerLost, match=r"rank 0, step 0: a worker of a DataLoader has died: got .* Killed\. .*num_workers"
    ) as lost:
        Pending(watch(), "sum", two_phases([], work)).wait()
    assert lost.value.exit_code == 5


def test_a_failed_collective_stays_an_error() -> None:
    """Half of its result may be there, and could be added twice."""
    diary: list[str] = []
    pending = Pending(watch(), "sum", two_phases(diary, Work(diary), Work(diary, "timed out")))
    with pytest.raises(MeshError, match=r"rank 0, step 0, sum"):
        pending.wait()
    for _ in range(2):
        with pytest.raises(MeshError, match="sum: this collective failed earlier"):
            pending.wait()
    assert diary == ["work", "result"]


def device_collectives() -> tuple[list[str], list[list[float]]]:
    here, shard = device.use(), build_mesh(MeshShape(shard=2), shared_memory=False).shard
    full, part = (torch.arange(4.0) + shard.index).to("standin"), torch.empty(2, device="standin")
    norm = torch.ones(1, dtype=torch.float64, device="standin")
    message = torch.full((3,), float(shard.index), device="standin")
    here.reset()
    shard.reduce_scatter(full, part, "gradients").wait()
    shard.all_gather(full, part, "parameters").wait()
    shard.all_reduce(full, "replicas").wait()
    shard.all_reduce_small(norm, "norm")
    if shard.index == 0:
        shard.send(message, 1, "activation", 7).wait()
    else:
        shard.receive(message, 0, "activation", 7).wait()
    waits = list(here.waits)
    return waits, [each.tolist() for each in (part, full, norm, message)]


def test_the_host_waits_for_no_collective_of_device_tensors(devices: Pools) -> None:
    total = [2.0, 6.0, 10.0, 14.0]
    assert devices(2).run(device_collectives) == [
        ([], [[1.0, 3.0], total, [2.0], [0.0] * 3]),
        ([], [[5.0, 7.0], total, [2.0], [0.0] * 3]),
    ]


def control_values() -> tuple[int, list[int], list[float]]:
    here, shard = device.use(), build_mesh(MeshShape(shard=2), shared_memory=False).shard
    here.reset()
    found = shard.gather_json(shard.index, "facts")
    return len(here.waits), found, agree_on([2.5 + shard.index])


def test_control_values_stay_on_the_host(devices: Pools) -> None:
    # the lengths and the values, each sent and received
    assert devices(2).run(control_values) == [(4, [0, 1], [2.5])] * 2


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


def test_the_groups_of_an_axis_have_the_timeout_of_the_mesh(devices: Pools) -> None:
    assert devices(4).run(timeouts_of_groups) == [[7.0, 7.0, 9.0, 9.0]] * 4


def axis_over(work: Work, monkeypatch: pytest.MonkeyPatch) -> AxisComm:
    """Axis index 0 of global ranks 4 and 6, whose messages are all ``work``."""
    monkeypatch.setattr(dist, "isend", lambda *_, **__: work)
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: work)
    return AxisComm("pipe", (4, 6), 0, None, CommCounters(), Heartbeat(None, 4, 8), 0.5)


def test_a_message_can_be_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(3.0)
    work = Work([])
    work.done = True
    message = axis_over(work, monkeypatch).send(values, 1, "activations", 7)
    assert message.done and message.wait() is values and message.wait() is values


def test_a_failure_names_the_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = axis_over(Work([], "timed out"), monkeypatch).receive(torch.empty(2), 1, "activations", 7)
    assert not message.done
    with pytest.raises(MeshError, match=r"rank 4, step 0, receive\(activations\) from rank 6: waited 0.5 s for rank 6"):
        message.wait()
