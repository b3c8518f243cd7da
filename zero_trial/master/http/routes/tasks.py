"""Routes of tasks and their allocations: what the harness asks while it sets a trial up and runs it."""

from __future__ import annotations

import base64
import math

from zero_trial.master.errors import Invalid
from zero_trial.master.http import render_machine as render
from zero_trial.master.http.request import Request
from zero_trial.master.http.response import Response, ok
from zero_trial.master.http.router import AuthLevel, Route

MAX_POLL = 60.0  # seconds that a long poll waits
CROWDED_POLL = 1.0  # the same when too many wait already


def context_directory(call: Request) -> Response:
    """GET /tasks/{taskId}/context_directory."""
    return ok({"b64Tgz": base64.b64encode(call.cluster.tasks.context(call.text("taskId"))).decode()})


def accelerator_data(call: Request) -> Response:
    """POST /allocations/{allocationId}/acceleratorData."""
    data = call.body().get("acceleratorData")
    call.cluster.tasks.accelerator_data(call.text("allocationId"), data if isinstance(data, dict) else {})
    return Response()


def rendezvous(call: Request) -> Response:
    """GET /allocations/{allocationId}/resources/{resourcesId}/rendezvous."""
    found = call.cluster.tasks.rendezvous(call.text("allocationId"), call.text("resourcesId"))
    return ok({"rendezvousInfo": {"addresses": list(found.addresses), "rank": found.rank, "slots": list(found.slots)}})


def preemption(call: Request) -> Response:
    """GET /allocations/{allocationId}/signals/preemption: a long poll, shorter when too many wait already."""
    text = call.request.first("timeout_seconds") or call.request.first("timeoutSeconds") or "60"
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not timeout >= 0:
        raise Invalid("timeout_seconds must be a number of seconds", got=text[:40])
    with call.waits.one() as room:
        wait = min(timeout, MAX_POLL if room else CROWDED_POLL)
        return ok({"preempt": call.cluster.tasks.preemption_signal(call.text("allocationId"), wait)})


def ack_preemption(call: Request) -> Response:
    """POST /allocations/{allocationId}/signals/ack_preemption."""
    call.cluster.tasks.ack_preemption(call.text("allocationId"))
    return Response()


def ready(call: Request) -> Response:
    """POST /allocations/{allocationId}/ready."""
    call.cluster.tasks.set_ready(call.text("allocationId"))
    return Response()


def post_logs(call: Request) -> Response:
    """POST /task/logs: lines that come over HTTP instead of through the pipe."""
    lines = call.body().get("logs")
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise Invalid("logs must be a list of lines")
    by_task: dict[str, list[dict[str, object]]] = {}
    for line in lines:
        task_id = line.get("taskId", line.get("task_id"))
        if not isinstance(task_id, str):
            raise Invalid("a log line has no taskId")
        call.own(task_id=task_id)
        by_task.setdefault(task_id, []).append(line)
    for task_id, some in by_task.items():
        call.cluster.tasks.append_logs(task_id, some)
    return Response()


def get(call: Request) -> Response:
    """GET /tasks/{taskId}."""
    return ok({"task": render.task(call.cluster.tasks.task(call.text("taskId")))})


def get_allocation(call: Request) -> Response:
    """GET /allocations/{allocationId}."""
    return ok({"allocation": render.allocation(call.cluster.tasks.allocation(call.text("allocationId")))})


def list_all(call: Request) -> Response:
    """GET /tasks."""
    cluster = call.cluster
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
                summaries[allocation.id] = render.allocation_summary(task, allocation, agent_id, pool, priority, needed)
    return ok({"allocationIdToSummary": summaries})


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
