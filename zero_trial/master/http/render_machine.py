"""The machine, its queue and its users as the plain dicts that Determined's bindings read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_trial.master.http.render import PROJECT_ID, WORKSPACE, WORKSPACE_ID, maybe_when, when
from zero_trial.master.records import (
    AgentInfo,
    Allocation,
    AllocationState,
    Job,
    MasterInfo,
    ResourcePool,
    SlotInfo,
    Task,
    User,
)

Dict = dict[str, Any]

# What a pool of containers in a cloud would say, and the bindings insist on.
_EMPTY_TEXTS = (
    *(
        "agentDockerImage",
        "agentDockerNetwork",
        "agentDockerRuntime",
        "agentFluentImage",
        "clusterName",
        "containerStartupScript",
    ),
    *("imageId", "instanceType", "location", "masterCertName", "masterUrl", "startupScript", "accelerator"),
)
_ALLOCATION_STATES = {
    AllocationState.QUEUED: "STATE_QUEUED",
    AllocationState.STARTING: "STATE_STARTING",
    AllocationState.RUNNING: "STATE_RUNNING",
    AllocationState.TERMINATED: "STATE_TERMINATED",
}


def info(record: MasterInfo) -> Dict:
    """What ``GET /info`` tells anybody; every det command asks for it first."""
    return {
        "version": record.version,
        "master_id": record.master_id,
        "cluster_id": record.cluster_id,
        "cluster_name": record.cluster_name,
        "telemetry": {"enabled": False},
        "sso_providers": [],
    }


def master(record: MasterInfo) -> Dict:
    """v1GetMasterResponse."""
    return {
        "version": record.version,
        "masterId": record.master_id,
        "clusterId": record.cluster_id,
        "clusterName": record.cluster_name,
        "telemetryEnabled": False,
        "ssoProviders": [],
        "branding": "",
        "rbacEnabled": False,
        "product": "PRODUCT_UNSPECIFIED",
        "userManagementEnabled": True,
        "strictJobQueueControl": False,
        "hasCustomLogo": False,
        "featureSwitches": [],
    }


def user(record: User) -> Dict:
    """v1User; the password stays where it is."""
    return {
        "id": record.id,
        "username": record.name,
        "displayName": record.display_name,
        "admin": record.admin,
        "active": record.active,
        "remote": False,
    }


def device(slot: SlotInfo) -> Dict:
    """v1Device."""
    return {"id": slot.number, "brand": slot.name, "uuid": slot.uuid, "type": f"TYPE_{slot.device_type.upper()}"}


def slot(record: SlotInfo, allocation: Allocation | None) -> Dict:
    """v1Slot; ``allocation`` is who holds it."""
    holder = None if allocation is None else container(allocation, [record])
    return {
        "id": str(record.number),
        "device": device(record),
        "enabled": record.enabled,
        "draining": False,
        "container": holder,
    }


def container(allocation: Allocation, slots: Iterable[SlotInfo]) -> Dict:
    """v1Container: what a real agent runs an allocation in."""
    devices = [device(slot) for slot in slots]
    state = "STATE_RUNNING" if allocation.state is AllocationState.RUNNING else "STATE_STARTING"
    return {"id": allocation.container_id, "parent": "", "state": state, "devices": devices, "permissionDenied": False}


def agent(record: AgentInfo, allocations: Iterable[Allocation]) -> Dict:
    """v1Agent with its slots and what runs on them."""
    running = {allocation.id: allocation for allocation in allocations}
    containers = {
        allocation.container_id: container(
            allocation, [slot for slot in record.slots if slot.allocation_id == allocation.id]
        )
        for allocation in running.values()
    }
    return {
        "id": record.id,
        "registeredTime": when(record.registered),
        "slots": {str(each.number): slot(each, running.get(each.allocation_id or "")) for each in record.slots},
        "containers": containers,
        "addresses": ["127.0.0.1"],
        "enabled": True,
        "draining": False,
        "version": record.version,
        "resourcePools": [record.resource_pool],
        "slotStats": {"typeStats": {}, "brandStats": {}},
    }


def allocation_summary(
    task: Task, allocation: Allocation, agent_id: str, pool: str, priority: int, slots_needed: int
) -> Dict:
    """v1AllocationSummary."""
    resources = {
        "resourcesId": allocation.resources_id,
        "resourcesType": "docker-container",
        "allocationId": allocation.id,
        "agentDevices": {agent_id: {"devices": []}},
        "containerId": allocation.container_id,
    }
    return {
        "taskId": task.id,
        "allocationId": allocation.id,
        "name": task.name,
        "registeredTime": when(allocation.created),
        "resourcePool": pool,
        "slotsNeeded": slots_needed,
        "resources": [] if allocation.state is AllocationState.QUEUED else [resources],
        "schedulerType": "priority",
        "priority": priority,
        "proxyPorts": [],
    }


def allocation(record: Allocation) -> Dict:
    """v1Allocation."""
    return {
        "taskId": record.task_id,
        "allocationId": record.id,
        "state": _ALLOCATION_STATES[record.state],
        "isReady": record.ready,
        "startTime": maybe_when(record.started),
        "endTime": maybe_when(record.ended),
        "slots": len(record.slots),
        "statusCode": record.exit_code,
    }


def task(record: Task) -> Dict:
    """v1Task."""
    return {
        "taskId": record.id,
        "taskType": "TASK_TYPE_TRIAL",
        "startTime": when(record.started),
        "endTime": maybe_when(record.ended),
        "allocations": [allocation(each) for each in record.allocations],
    }


def job(record: Job, *, pool: str, user_id: int) -> Dict:
    """v1Job."""
    return {
        "jobId": record.id,
        "entityId": str(record.experiment_id),
        "type": "TYPE_EXPERIMENT",
        "name": record.name,
        "username": record.owner,
        "userId": user_id,
        "submissionTime": when(record.submitted),
        "resourcePool": pool,
        "isPreemptible": True,
        "priority": record.priority,
        "weight": record.weight,
        "requestedSlots": record.requested_slots,
        "allocatedSlots": record.allocated_slots,
        "progress": record.progress,
        "summary": {"state": f"STATE_{record.state}", "jobsAhead": record.jobs_ahead},
        "workspaceId": WORKSPACE_ID,
    }


def resource_pool(record: ResourcePool) -> Dict:
    """v1ResourcePool."""
    text = dict.fromkeys(_EMPTY_TEXTS, "")
    counts = dict.fromkeys(
        ("auxContainerCapacity", "auxContainerCapacityPerAgent", "auxContainersRunning", "minAgents"), 0
    )
    return {
        **text,
        **counts,
        "name": record.name,
        "description": record.description,
        "type": "RESOURCE_POOL_TYPE_STATIC",
        "numAgents": record.agents,
        "maxAgents": record.agents,
        "slotsAvailable": record.slots,
        "slotsUsed": record.used,
        "slotsPerAgent": record.slots,
        "slotType": f"TYPE_{record.slot_type.upper()}",
        "defaultComputePool": True,
        "defaultAuxPool": True,
        "preemptible": False,
        "maxIdleAgentPeriod": 0.0,
        "maxAgentStartingPeriod": 0.0,
        "schedulerType": "SCHEDULER_TYPE_PRIORITY",
        "schedulerFittingPolicy": "FITTING_POLICY_BEST",
        "details": {"priorityScheduler": {"preemption": False, "defaultPriority": 42, "k8Priorities": []}},
        "resourceManagerMetadata": {},
    }


def workspace(experiments: int) -> Dict:
    """v1Workspace: the one that there is."""
    return {
        "id": WORKSPACE_ID,
        "name": WORKSPACE,
        "archived": False,
        "errorMessage": "",
        "immutable": True,
        "numExperiments": experiments,
        "numProjects": 1,
        "pinned": False,
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": 1,
        "username": "determined",
    }


def project(experiments: int, active: int) -> Dict:
    """v1Project: the one that there is."""
    return {
        "id": PROJECT_ID,
        "name": WORKSPACE,
        "key": "UNC",
        "description": "",
        "archived": False,
        "errorMessage": "",
        "immutable": True,
        "notes": [],
        "numActiveExperiments": active,
        "numExperiments": experiments,
        "numRuns": experiments,
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": 1,
        "username": "determined",
        "workspaceId": WORKSPACE_ID,
        "workspaceName": WORKSPACE,
    }
