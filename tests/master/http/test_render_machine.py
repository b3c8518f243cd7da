"""The machine as dicts that Determined's bindings read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.master.http.fake_cluster import FakeCluster, allocation
from zero_trial.master.http import render_machine as render
from zero_trial.master.records import AllocationState, User

bindings = pytest.importorskip("determined.common.api.bindings")


@pytest.mark.parametrize("state", list(AllocationState))
def test_every_state_of_an_allocation_is_one_that_clients_know(state: AllocationState) -> None:
    found = bindings.v1Allocation.from_json(render.allocation(replace(allocation(1, 1), state=state)))
    assert found.state.name == state.value


def test_a_queued_allocation_has_no_resources() -> None:
    (task, _) = FakeCluster().tasks.tasks()
    queued = replace(allocation(1, 1), state=AllocationState.QUEUED, slots=())
    found = bindings.v1AllocationSummary.from_json(render.allocation_summary(task, queued, "laptop", "default", 42, 2))
    assert (found.resources, found.slotsNeeded) == ([], 2)


def test_a_slot_whose_holder_is_unknown_is_free() -> None:
    (agent,) = FakeCluster().machine.agents()
    found = bindings.v1Agent.from_json(render.agent(agent, []))
    assert [slot.container for slot in found.slots.values()] == [None, None]


def test_a_gpu_is_a_cuda_device() -> None:
    (agent,) = FakeCluster().machine.agents()
    slot = replace(agent.slots[0], device_type="cuda", name="H200", uuid="GPU-1")
    found = bindings.v1Device.from_json(render.device(slot))
    assert (found.type, found.brand, found.uuid) == (bindings.devicev1Type.CUDA, "H200", "GPU-1")


def test_a_password_is_never_shown() -> None:
    assert "secret" not in str(render.user(User(1, "a", True, True, "secret")))
