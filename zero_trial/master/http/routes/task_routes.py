"""Routes of tasks and their allocations: what is known of them, and what an allocation asks and
reports while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zero_trial.master.agent.resources import POOL
from zero_trial.master.http.messages import (
    AuthLevel,
    Dict,
    Request,
    Response,
    Route,
    StreamingResponse,
    maybe_when,
    ok,
    packed,
    when,
)
from zero_trial.master.records import Allocation, AllocationState, Invalid, NotFound, Task

_MAX_POLL = 60.0  # seconds that a long poll waits
_CROWDED_POLL = 1.0  # the same when too many wait already


def _context_directory(request: Request) -> StreamingResponse:
    return packed(request.master.tasks.context(request.args["taskId"]))


def _accelerator_data(request: Request) -> Response:
    """Take what nothing here shows: the harness sends it at the start of each run."""
    request.body()
    return Response()


def _rendezvous(request: Request) -> Response:
    found = request.master.tasks.allocation(request.args["allocationId"])
    if found.resources_id != request.args["resourcesId"]:
        raise NotFound(f"resources {request.args['resourcesId'][:60]} not found")
    return ok({"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": [len(found.slots)]}})


def _all_gather(request: Request) -> Response:
    """Wait until all containers of an allocation have sent their data, and return all of it."""
    body = request.body()
    name, peers = body.get("requestUuid"), body.get("numPeers")
    if not isinstance(name, str) or not isinstance(peers, int) or peers < 1:
        raise Invalid("all_gather needs a requestUuid and a positive numPeers")
    with request.waits.one() as room:
        wait = _MAX_POLL if room else _CROWDED_POLL
        found = request.master.tasks.all_gather(request.args["allocationId"], name, peers, body.get("data"), wait)
    return ok({"data": found})


def _preemption(request: Request) -> Response:
    """Wait until the allocation is to stop: a long poll, shorter when too many wait already."""
    text = request.first("timeout_seconds") or request.first("timeoutSeconds") or "60"
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not timeout >= 0:
        raise Invalid("timeout_seconds must be a number of seconds", got=text[:40])
    with request.waits.one() as room:
        wait = min(timeout, _MAX_POLL if room else _CROWDED_POLL)
        return ok({"preempt": request.master.tasks.preemption_signal(request.args["allocationId"], wait)})


def _ack_preemption(request: Request) -> Response:
    request.master.tasks.ack_preemption(request.args["allocationId"])
    return Response()


def _post_logs(request: Request) -> Response:
    """Store the log lines of core_v2 in an unmanaged trial."""
    by_task: dict[str, list[dict[str, object]]] = {}
    for line in request.list_body():
        if not isinstance(line, dict):
            raise Invalid("logs must be a list of lines")
        task_id = line.get("task_id")
        if not isinstance(task_id, str):
            raise Invalid("a log line has no task_id")
        request.own(task_id=task_id)
        by_task.setdefault(task_id, []).append({**line, "rankId": line.get("rank")})
    for task_id, some in by_task.items():
        request.master.tasks.append_logs(task_id, some)
    return Response()


def _get_task(request: Request) -> Response:
    return ok({"task": _task_json(request.master.tasks.task(request.args["taskId"]))})


def _list_tasks(request: Request) -> Response:
    return ok({"allocationIdToSummary": _summaries(request)})


def _summaries(request: Request) -> Dict:
    cluster = request.master
    return {
        allocation.id: allocation_summary_json(task, allocation, cluster.machine.nodes_of(allocation))
        for task in cluster.tasks.tasks()
        for allocation in task.allocations
        if allocation.ended is None
    }


# -- what the answers contain, in the shapes of Determined's bindings

_ALLOCATION_STATES = {
    AllocationState.QUEUED: "STATE_QUEUED",
    AllocationState.STARTING: "STATE_STARTING",
    AllocationState.RUNNING: "STATE_RUNNING",
    AllocationState.TERMINATED: "STATE_TERMINATED",
}


def allocation_summary_json(task: Task, allocation: Allocation, nodes: Sequence[str]) -> Dict:
    """Render a v1AllocationSummary."""
    slots, priority = task.resources.get("slots_per_trial"), task.resources.get("priority")
    resources = {
        "resourcesId": allocation.resources_id,
        "resourcesType": "docker-container",
        "allocationId": allocation.id,
        "agentDevices": {name: {"devices": []} for name in nodes},
        "containerId": allocation.container_id,
    }
    return {
        "taskId": task.id,
        "allocationId": allocation.id,
        "name": task.name,
        "registeredTime": when(allocation.created),
        "resourcePool": task.resources.get("resource_pool") or POOL,
        "slotsNeeded": 1 if slots is None else int(slots),
        "resources": [] if allocation.state is AllocationState.QUEUED else [resources],
        "schedulerType": "priority",
        "priority": 42 if priority is None else int(priority),
        "proxyPorts": [],
    }


def allocation_json(record: Allocation) -> Dict:
    """Render a v1Allocation."""
    return {
        "taskId": record.task_id,
        "allocationId": record.id,
        "state": _ALLOCATION_STATES[record.state],
        "startTime": maybe_when(record.started),
        "endTime": maybe_when(record.ended),
        "slots": len(record.slots),
        "statusCode": record.exit_code,
    }


def _task_json(record: Task) -> Dict:
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
    Route("GET", "/api/v1/tasks", _list_tasks),
    Route("GET", _TASK, _get_task, AuthLevel.BOTH),
    Route("GET", f"{_TASK}/context_directory", _context_directory, AuthLevel.TASK),
    Route("POST", "/task-logs", _post_logs, AuthLevel.BOTH),
    Route("POST", f"{_ALLOCATION}/acceleratorData", _accelerator_data, AuthLevel.TASK),
    Route("GET", f"{_ALLOCATION}/resources/{{resourcesId}}/rendezvous", _rendezvous, AuthLevel.TASK),
    Route("GET", f"{_ALLOCATION}/signals/preemption", _preemption, AuthLevel.TASK),
    Route("POST", f"{_ALLOCATION}/signals/ack_preemption", _ack_preemption, AuthLevel.TASK),
    Route("POST", f"{_ALLOCATION}/all_gather", _all_gather, AuthLevel.TASK),
)
