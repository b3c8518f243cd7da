"""The machine and its queue as the original client asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import World

bindings = pytest.importorskip("determined.common.api.bindings")
errors = pytest.importorskip("determined.common.api.errors")
client = pytest.importorskip("determined.experimental.client")


def test_identity_of_the_master(ask: Ask, user: Any, world: World) -> None:
    status, answer = ask("GET", "/info")
    assert (status, answer["version"], answer["telemetry"]) == (200, "0.38.1", {"enabled": False})
    found = bindings.get_GetMaster(user)
    assert (found.version, found.clusterName, found.rbacEnabled) == ("0.38.1", world.machine.info.cluster_name, False)
    assert bindings.get_GetMasterConfig(user).config["resource_pools"] == [
        {"pool_name": "default", "description": "the slots of this machine"}
    ]


def test_agents_and_slots_with_their_holders(user: Any, world: World) -> None:
    (agent,) = bindings.get_GetAgents(user).agents
    assert (agent.id, sorted(agent.slots), agent.resourcePools) == ("laptop", ["0", "1"], ["default"])
    assert agent.slots["0"].container.id == "container-1"
    world.exit(2)
    assert bindings.get_GetAgents(user).agents[0].slots["1"].container is None
    assert agent.slots["0"].device.type is bindings.devicev1Type.CPU
    for path in ("/api/v1/agents/elsewhere/enable", "/api/v1/agents/laptop/slots/7/enable"):
        with pytest.raises(errors.NotFoundException):
            user.post(path)


def test_a_machine_is_drained(user: Any, world: World) -> None:
    body = bindings.v1DisableAgentRequest(agentId="laptop", drain=True)
    agent = bindings.post_DisableAgent(user, agentId="laptop", body=body).agent
    assert (agent.enabled, agent.draining, agent.slots["0"].draining) == (False, True, True)
    assert world.agent.killed == []


def test_the_one_pool_and_its_queue(user: Any) -> None:
    (pool,) = bindings.get_GetResourcePools(user).resourcePools
    assert (pool.name, pool.slotsAvailable, pool.slotsUsed, pool.defaultComputePool) == ("default", 2, 2, True)
    assert pool.schedulerType is bindings.v1SchedulerType.PRIORITY
    assert bindings.get_ListRPsBoundToWorkspace(user, workspaceId=1).resourcePools == ["default"]
    with pytest.raises(errors.APIException, match="cannot be bound to a workspace"):
        client.ResourcePool(user, "default").add_bindings(["Uncategorized"])
    job, _ = bindings.get_GetJobsV2(user, resourcePool=None, offset=0, limit=100, orderBy=bindings.v1OrderBy.ASC).jobs
    assert (job.full.jobId, job.full.entityId, job.full.priority, job.full.allocatedSlots) == ("job-1", "1", 42, 1)
    assert job.full.summary.state is bindings.jobv1State.SCHEDULED
    for unknown in (
        lambda: bindings.get_ListRPsBoundToWorkspace(user, workspaceId=2),
        lambda: bindings.get_GetJobsV2(user, resourcePool="other"),
    ):
        with pytest.raises(errors.NotFoundException):
            unknown()


def test_priorities_are_changed_through_the_queue(user: Any, world: World) -> None:
    def update(**control: Any) -> None:
        body = bindings.v1UpdateJobQueueRequest(updates=[bindings.v1QueueControl(jobId="job-1", **control)])
        bindings.post_UpdateJobQueue(user, body=body)

    def resources() -> tuple[int, float]:
        job = next(job for job in world.machine.jobs() if job.id == "job-1")
        return job.priority, job.weight

    update(priority=7)
    update(weight=2.5)
    assert resources() == (7, 2.5)
    for control in ({"aheadOf": "job-2"}, {"resourcePool": "other"}):
        with pytest.raises(errors.APIException) as caught:
            update(**control)
        assert caught.value.status_code == 501
    assert resources() == (7, 2.5)
