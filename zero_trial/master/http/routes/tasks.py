"""Routes of tasks and their allocations: what the harness asks while it sets a trial up and runs
it.
"""

from __future__ import annotations

import base64
import math

from zero_trial.master.http.request import AuthLevel, Request, Route
from zero_trial.master.http.response import Dict, Response, maybe_when, ok, when
from zero_trial.master.records import Allocation, AllocationState, Invalid, Task

MAX_POLL = 60.0  # seconds that a long poll waits
CROWDED_POLL = 1.0  # the same when too many wait already


def context_directory(request: Request) -> Response:
    """GET /tasks/{taskId}/context_directory."""
    return ok({"b64Tgz": base64.b64encode(request.master.tasks.context(request.text("taskId"))).decode()})


def accelerator_data(request: Request) -> Response:
    """POST /allocations/{allocationId}/acceleratorData."""
    data = request.body().get("acceleratorData")
    request.master.tasks.accelerator_data(request.text("allocationId"), data if isinstance(data, dict) else {})
    return Response()


def rendezvous(request: Request) -> Response:
    """GET /allocations/{allocationId}/resources/{resourcesId}/rendezvous."""
    found = request.master.tasks.rendezvous(request.text("allocationId"), request.text("resourcesId"))
    return ok({"rendezvousInfo": {"addresses": list(found.addresses), "rank": found.rank, "slots": list(found.slots)}})


def preemption(request: Request) -> Response:
    """GET /allocations/{allocationId}/signals/preemption: a long poll, shorter when too many wait
    already.
    """
    text = request.first("timeout_seconds") or request.first("timeoutSeconds") or "60"
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not timeout >= 0:
        raise Invalid("timeout_seconds must be a number of seconds", got=text[:40])
    with request.waits.one() as room:
        wait = min(timeout, MAX_POLL if room else CROWDED_POLL)
        return ok({"preempt": request.master.tasks.preemption_signal(request.text("allocationId"), wait)})


def ack_preemption(request: Request) -> Response:
    """POST /allocations/{allocationId}/signals/ack_preemption."""
    request.master.tasks.ack_preemption(request.text("allocationId"))
    return Response()


def ready(request: Request) -> Response:
    """POST /allocations/{allocationId}/ready."""
    request.master.tasks.set_ready(request.text("allocationId"))
    return Response()


def post_logs(request: Request) -> Response:
    """POST /task/logs: lines that come over HTTP instead of through the pipe."""
    lines = request.body().get("logs")
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise Invalid("logs must be a list of lines")
    by_task: dict[str, list[dict[str, object]]] = {}
    for line in lines:
        task_id = line.get("taskId", line.get("task_id"))
        if not isinstance(task_id, str):
            raise Invalid("a log line has no taskId")
        request.own(task_id=task_id)
        by_task.setdefault(task_id, []).append(line)
    for task_id, some in by_task.items():
        request.master.tasks.append_logs(task_id, some)
    return Response()


def get(request: Request) -> Response:
    """GET /tasks/{taskId}."""
    return ok({"task": task_json(request.master.tasks.task(request.text("taskId")))})


def get_allocation(request: Request) -> Response:
    """GET /allocations/{allocationId}."""
    return ok({"allocation": allocation_json(request.master.tasks.allocation(request.text("allocationId")))})


def list_all(request: Request) -> Response:
    """GET /tasks."""
    cluster = request.master
    agents = cluster.machine.agents()
    agent_id, pool = (agents[0].id, agents[0].resource_pool) if agents else ("", "")
    jobs = {job.experiment_id: job for job in cluster.machine.jobs()}
    summaries = {}
    for task in cluster.tasks.tasks():
        job = jobs.get(task.experiment_id)
        resources = cluster.experiments.get(task.experiment_id).config.get("resources")
        needed = int(resources.get("slots_per_trial", 1)) if isinstance(resources, dict) else 1
        for allocation in task.allocations:
            if allocation.ended is None:
                priority = job.priority if job is not None else 42
                summaries[allocation.id] = allocation_summary_json(task, allocation, agent_id, pool, priority, needed)
    return ok({"allocationIdToSummary": summaries})


# -- what the answers contain, in the shapes of Determined's bindings

_ALLOCATION_STATES = {
    AllocationState.QUEUED: "STATE_QUEUED",
    AllocationState.STARTING: "STATE_STARTING",
    AllocationState.RUNNING: "STATE_RUNNING",
    AllocationState.TERMINATED: "STATE_TERMINATED",
}


def allocation_summary_json(
    task: Task, allocation: Allocation, agent_id: str, pool: str, priority: int, slots_needed: int
) -> Dict:
    """Render a v1AllocationSummary."""
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


def allocation_json(record: Allocation) -> Dict:
    """Render a v1Allocation."""
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


def task_json(record: Task) -> Dict:
    """Render a v1Task."""
    return {
        "taskId": record.id,
        "taskType": "TASK_TYPE_TRIAL",
        "startTime": when(record.started),
        "endTime": maybe_when(record.ended),
        "allocations": [allocation_json(each) for each in record.allocations],
    }


_TASK = "/api/v1/tasks/{taskId}"
_ALLOCATION = "/api/v1/allocations/{allocationId}"

ROUTES = (
    Route("GET", "/api/v1/tasks", list_all),
    Route("GET", _TASK, get, AuthLevel.BOTH),
    Route("GET", f"{_TASK}/context_directory", context_directory, AuthLevel.TASK),
    Route("POST", "/api/v1/task/logs", post_logs, AuthLevel.TASK),
    Route("GET", _ALLOCATION, get_allocation, AuthLevel.BOTH),
    Route("POST", f"{_ALLOCATION}/acceleratorData", accelerator_data, AuthLevel.TASK),
    Route("GET", f"{_ALLOCATION}/resources/{{resourcesId}}/rendezvous", rendezvous, AuthLevel.TASK),
    Route("GET", f"{_ALLOCATION}/signals/preemption", preemption, AuthLevel.TASK),
    Route("POST", f"{_ALLOCATION}/signals/ack_preemption", ack_preemption, AuthLevel.TASK),
    Route("POST", f"{_ALLOCATION}/ready", ready, AuthLevel.TASK),
)
