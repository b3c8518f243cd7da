"""Tasks and allocations as the genuine harness asks for them."""

from __future__ import annotations

import base64
import threading
import time
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import TASK_TOKEN, World
from zero_trial.master.http import Server
from zero_trial.master.records import LogQuery

bindings = pytest.importorskip("determined.common.api.bindings")
errors = pytest.importorskip("determined.common.api.errors")

POLL = "/api/v1/allocations/task-1.1/signals/preemption"


@pytest.fixture
def waits(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long each poll would have waited; none does."""
    seen: list[float] = []
    ask = world.tasks.preemption_signal

    def at_once(allocation_id: str, timeout: float) -> bool:
        seen.append(timeout)
        return ask(allocation_id, 0)

    monkeypatch.setattr(world.tasks, "preemption_signal", at_once)
    return seen


def test_a_trial_is_set_up(task: Any, world: World) -> None:
    packed = base64.b64decode(bindings.get_GetTaskContextDirectory(task, taskId="task-1").b64Tgz)
    assert packed == world.experiments.context(1)
    data = bindings.v1AcceleratorData(
        acceleratorType="cpu", acceleratorUuids=[], allocationId="task-1.1", taskId="task-1"
    )
    body = bindings.v1PostAllocationAcceleratorDataRequest(acceleratorData=data, allocationId="task-1.1")
    bindings.post_PostAllocationAcceleratorData(task, allocationId="task-1.1", body=body)
    found = bindings.get_AllocationRendezvousInfo(
        task, allocationId="task-1.1", resourcesId="resources-1"
    ).rendezvousInfo
    assert (found.addresses, found.rank, found.slots) == (["127.0.0.1"], 0, [1])
    bindings.post_AllocationReady(task, allocationId="task-1.1", body=bindings.v1AllocationReadyRequest())
    assert world.tasks.allocation("task-1.1").ready


def test_preemption_is_told_at_once_when_nobody_waits(task: Any, world: World) -> None:
    assert task.get(POLL, params={"timeout_seconds": "0"}).json() == {"preempt": False}
    world.experiments.pause(1)
    assert task.get(POLL, params={"timeout_seconds": "60"}).json() == {"preempt": True}
    bindings.post_AckAllocationPreemptionSignal(
        task, allocationId="task-1.1", body=bindings.v1AckAllocationPreemptionSignalRequest(allocationId="task-1.1")
    )
    assert world.tasks.allocation("task-1.1").acked


def test_a_long_poll_ends_when_it_is_time(task: Any, world: World) -> None:
    timer = threading.Timer(0.1, lambda: world.experiments.pause(1))
    timer.start()
    assert task.get(POLL, params={"timeout_seconds": "60"}).json() == {"preempt": True}
    timer.join()


@pytest.mark.parametrize("seconds", ["x", "-1", "nan"])
def test_a_wait_that_is_none_is_refused(ask: Ask, seconds: str) -> None:
    assert ask("GET", f"{POLL}?timeout_seconds={seconds}", task=TASK_TOKEN)[0] == 400


def test_nobody_waits_longer_than_a_minute(ask: Ask, waits: list[float]) -> None:
    assert ask("GET", f"{POLL}?timeout_seconds=inf", task=TASK_TOKEN) == (200, {"preempt": False})
    assert waits == [60.0]


def test_when_too_many_wait_the_next_waits_a_second_and_others_are_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long polls take three quarters of the connections at most: four here, so three of them."""
    api = pytest.importorskip("determined.common.api")
    asked: list[float] = []
    signal = world.tasks.preemption_signal
    monkeypatch.setattr(
        world.tasks, "preemption_signal", lambda name, seconds: (asked.append(seconds), signal(name, seconds))[1]
    )
    with Server(world, connections=4) as server:
        session = api.TaskSession(server.url, "determined", TASK_TOKEN, None, max_retries=0)
        polls = [threading.Thread(target=lambda: session.get(POLL, params={"timeout_seconds": "60"})) for _ in range(3)]
        for poll in polls:
            poll.start()
        deadline = time.monotonic() + 10
        while len(asked) < 3 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert session.get(POLL, params={"timeout_seconds": "60"}).json() == {"preempt": False}
        assert sorted(asked) == [1.0, 60.0, 60.0, 60.0]
        world.experiments.pause(1)
        for poll in polls:
            poll.join(timeout=10)
            assert not poll.is_alive()


def test_lines_that_come_over_http_are_kept(task: Any, world: World, ask: Ask) -> None:
    logs = [{"taskId": "task-1", "log": "one\n", "rankId": 0}, {"task_id": "task-1", "log": "two\n"}]
    task.post("/api/v1/task/logs", json={"logs": logs})
    found = list(world.tasks.logs("task-1", LogQuery()))
    assert [(line.message, line.rank) for line in found if line is not None] == [("one", 0), ("two", None)]
    for wrong in ({"logs": "x"}, {"logs": [1]}, {"logs": [{"log": "no task"}]}):
        assert ask("POST", "/api/v1/task/logs", task=TASK_TOKEN, body=wrong)[0] == 400


def test_tasks_with_what_runs_for_them(user: Any) -> None:
    found = bindings.get_GetTasks(user).allocationIdToSummary
    assert sorted(found) == ["task-1.1", "task-2.1"]
    summary = found["task-1.1"]
    assert (summary.taskId, summary.slotsNeeded, summary.priority, summary.schedulerType) == (
        "task-1",
        1,
        42,
        "priority",
    )
    assert [resource.containerId for resource in summary.resources] == ["container-1"]
    assert [list(resource.agentDevices) for resource in summary.resources] == [["laptop"]]


def test_one_task_and_one_allocation(user: Any, task: Any) -> None:
    found = bindings.get_GetTask(user, taskId="task-1").task
    assert [(each.allocationId, each.state) for each in found.allocations] == [
        ("task-1.1", bindings.taskv1State.RUNNING)
    ]
    assert bindings.get_GetAllocation(task, allocationId="task-1.1").allocation.slots == 1
    with pytest.raises(errors.NotFoundException):
        bindings.get_GetTask(user, taskId="task-9")
