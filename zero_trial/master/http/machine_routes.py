"""Routes of the machine: identity of the master, slots and queue; and logs of trials, tasks and the
master, as streams that can be followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from zero_trial.experiment.sections import compile_pattern
from zero_trial.master.http.experiment_routes import job_summary_json, resource_changes
from zero_trial.master.http.messages import (
    Action,
    AuthLevel,
    Dict,
    Request,
    Response,
    Route,
    StreamingResponse,
    failure,
    fields,
    lines,
    when,
    whole,
)
from zero_trial.master.logs import LogLine, LogQuery
from zero_trial.master.records import (
    AgentInfo,
    Allocation,
    AllocationState,
    ExperimentPatch,
    Invalid,
    Job,
    NotFound,
    ResourcePool,
    SlotInfo,
    Unsupported,
)
from zero_trial.util.text import strip_control


def _info(request: Request) -> Dict:
    """Return the information that every det command requests first."""
    return {**asdict(request.master.machine.info), "telemetry": {"enabled": False}, "sso_providers": []}


def _master(request: Request) -> Dict:
    """Return a v1GetMasterResponse."""
    return {
        **fields(request.master.machine.info, "version", "master_id", "cluster_id", "cluster_name"),
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


def _master_config(request: Request) -> Dict:
    """Return the parts of a Determined master's configuration that apply here."""
    request.require_admin()
    machine = request.master.machine
    pools = machine.resource_pools()
    config = {
        "cluster_name": machine.info.cluster_name,
        "resource_manager": {"type": "agent", "scheduler": {"type": "priority", "preemption": False}},
        "resource_pools": [{"pool_name": pool.name, "description": pool.description} for pool in pools],
        "telemetry": {"enabled": False},
        "launch_error": True,  # a job that no machine can run is rejected instead of waiting forever
    }
    return {"config": config}


def _render_agents(request: Request) -> list[Dict]:
    running = [
        allocation
        for task in request.master.tasks.tasks()
        for allocation in task.allocations
        if allocation.state in (AllocationState.STARTING, AllocationState.RUNNING)
    ]
    return [agent_json(agent, running) for agent in request.master.machine.agents()]


def _find_agent(request: Request) -> Dict:
    for agent in _render_agents(request):
        if agent["id"] == request.args["agentId"]:
            return agent
    raise NotFound(f"agent {request.args['agentId'][:60]!r} not found")


def _switch_slot(enabled: bool) -> Action:
    def action(request: Request) -> Dict:
        request.require_admin()
        if str(request.number) not in _find_agent(request)["slots"]:
            raise NotFound(f"slot {request.number} not found")
        drain = bool(request.body().get("drain"))
        return {"slot": _slot_json(request.master.machine.set_slot_enabled(request.number, enabled, drain=drain))}

    return action


def _switch_agent(enabled: bool) -> Action:
    """Enable or disable all slots of the agent."""

    def action(request: Request) -> Dict:
        request.require_admin()
        _find_agent(request)
        drain = bool(request.body().get("drain"))
        request.master.machine.set_agent_enabled(request.args["agentId"], enabled, drain=drain)
        return {"agent": _find_agent(request)}

    return action


def _pools_of_workspace(request: Request) -> Dict:
    request.master.workspaces.get(request.number)
    return request.listed("resourcePools", request.master.machine.resource_pools(), lambda pool: pool.name)


def _jobs(request: Request) -> Dict:
    pool = request.first("resourcePool")
    if pool and pool not in [each.name for each in request.master.machine.resource_pools()]:
        raise NotFound(f"resource pool {pool[:60]!r} not found")
    ids = request.user_ids()
    found = [job for job in request.master.machine.jobs() if not pool or job.pool == pool]
    return request.listed(
        "jobs",
        found[::-1] if request.descending else found,
        lambda job: {"full": _job_json(job, user_id=ids.get(job.owner, 0))},
    )


def _update_jobs(request: Request) -> None:
    """Set priorities and weights. All updates are checked before any is applied."""
    updates = request.body().get("updates")
    if not isinstance(updates, list) or not all(isinstance(update, dict) for update in updates):
        raise Invalid("updates must be a list")
    numbers = {job.id: job.experiment_id for job in request.master.machine.jobs()}
    for update in updates:
        name = update.get("jobId")
        if not isinstance(name, str) or name not in numbers:
            raise NotFound(f"job {str(name)[:60]!r} is not in the queue")
        if update.get("aheadOf") or update.get("behindOf"):
            raise Unsupported("jobs cannot be moved ahead of or behind others; change the job's priority instead")
        if update.get("resourcePool"):
            raise Unsupported("jobs cannot change their resource pool")
    changes = [resource_changes(update) for update in updates]
    for update, change in zip(updates, changes, strict=True):
        request.master.experiments.patch(numbers[update["jobId"]], ExperimentPatch(resources=change))


# -- responses, in the format of Determined's bindings

_EMPTY_TEXTS = (
    *("agentDockerImage", "agentDockerNetwork", "agentDockerRuntime", "agentFluentImage", "clusterName", "imageId"),
    *("containerStartupScript", "startupScript", "instanceType", "location", "masterCertName", "masterUrl"),
    "accelerator",
)
_NO_COUNTS = ("auxContainerCapacity", "auxContainerCapacityPerAgent", "auxContainersRunning", "minAgents")


def device_json(slot: SlotInfo) -> Dict:
    """Render a v1Device."""
    return {"id": slot.number, "brand": slot.name, "uuid": slot.uuid, "type": f"TYPE_{slot.device_type.upper()}"}


def _slot_json(record: SlotInfo, allocation: Allocation | None = None) -> Dict:
    """Render a v1Slot. ``allocation``: the allocation that holds the slot."""
    holder = None if allocation is None else _container_json(allocation, [record])
    same = fields(record, "enabled", "draining")
    return {**same, "id": str(record.number), "device": device_json(record), "container": holder}


def _container_json(allocation: Allocation, slots: Iterable[SlotInfo]) -> Dict:
    """Render a v1Container, in which a Determined agent would run the allocation."""
    devices = [device_json(slot) for slot in slots]
    state = "STATE_RUNNING" if allocation.state is AllocationState.RUNNING else "STATE_STARTING"
    return {"id": allocation.container_id, "parent": "", "state": state, "devices": devices, "permissionDenied": False}


def agent_json(record: AgentInfo, allocations: Iterable[Allocation]) -> Dict:
    """Render a v1Agent with its slots and the allocations running on them."""
    running = {allocation.id: allocation for allocation in allocations}
    containers = {
        allocation.container_id: _container_json(
            allocation, [slot for slot in record.slots if slot.allocation_id == allocation.id]
        )
        for allocation in running.values()
    }
    return {
        **fields(record, "id", "enabled", "draining", "version", "resource_pools"),
        "registeredTime": when(record.registered),
        "slots": {str(each.number): _slot_json(each, running.get(each.allocation_id or "")) for each in record.slots},
        "containers": containers,
        "addresses": [record.address],
        "slotStats": {"typeStats": {}, "brandStats": {}},
    }


def _job_json(record: Job, *, user_id: int) -> Dict:
    """Render a v1Job."""
    same = ("name", "priority", "weight", "requested_slots", "allocated_slots", "progress", "workspace_id")
    return {
        **fields(record, *same),
        "jobId": record.id,
        "entityId": str(record.experiment_id),
        "type": "TYPE_EXPERIMENT",
        "username": record.owner,
        "userId": user_id,
        "submissionTime": when(record.submitted),
        "resourcePool": record.pool,
        "isPreemptible": True,
        "summary": job_summary_json(record),
    }


def _resource_pool_json(record: ResourcePool) -> Dict:
    """Render a v1ResourcePool."""
    return {
        **dict.fromkeys(_EMPTY_TEXTS, ""),
        **dict.fromkeys(_NO_COUNTS, 0),
        "name": record.name,
        "description": record.description,
        "type": "RESOURCE_POOL_TYPE_STATIC",
        "numAgents": record.agents,
        "maxAgents": record.agents,
        "slotsAvailable": record.slots,
        "slotsUsed": record.used,
        "slotsPerAgent": record.slots // max(1, record.agents),
        "slotType": f"TYPE_{record.slot_type.upper()}",
        "defaultComputePool": record.default,
        "defaultAuxPool": record.default,
        "preemptible": False,
        "maxIdleAgentPeriod": 0.0,
        "maxAgentStartingPeriod": 0.0,
        "schedulerType": "SCHEDULER_TYPE_PRIORITY",
        "schedulerFittingPolicy": "FITTING_POLICY_BEST",
        "details": {"priorityScheduler": {"preemption": False, "defaultPriority": 42, "k8Priorities": []}},
        "resourceManagerMetadata": {},
    }


# -- logs

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_WRITTEN_LEVEL = re.compile(r" ?(DEBUG|INFO|WARNING|ERROR|CRITICAL): ?")  # at the start of a line
_ENTRY = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z?) ([A-Z]+) (.*)")
_TAIL = 1024 * 1024  # maximum bytes to read of the master's log
# maximum instructions of a compiled searchText; the time per line grows with them
_LARGEST_PROGRAM = 1000
_FILTERS = {
    "allocation_id": "allocationIds",
    "container_id": "containerIds",
    "agent_id": "agentIds",
    "source": "sources",
    "stdtype": "stdtypes",
}


def _query(request: Request) -> LogQuery:
    """Return the log query of a request. Raises Invalid."""
    limit = request.query_number("limit")
    among: dict[str, list[Any]] = {
        "level": [level.removeprefix("LOG_LEVEL_") for level in request.query_all("levels")],
        "rank": [whole(text, "rankIds") for text in request.query_all("rankIds")],
        **{name: request.query_all(asked) for name, asked in _FILTERS.items()},
    }
    return LogQuery(
        follow=request.query_flag("follow"),
        limit=limit if limit > 0 else None,
        newest_first=request.descending,
        since=request.query_time("timestampAfter"),
        until=request.query_time("timestampBefore"),
        search="" if request.query_flag("enableRegex") else request.first("searchText"),
        among={name: values for name, values in among.items() if values},
    )


def _stream(
    request: Request, read: Callable[[LogQuery], Iterator[LogLine | None]], shape: Callable[[LogLine], Dict]
) -> Response | StreamingResponse:
    asked = _query(request)
    text = request.first("searchText") if request.query_flag("enableRegex") else ""
    if not text:
        found = read(asked)
    else:
        # RE2 matches in time linear in the line length, and without holding the GIL; with ``re``,
        # ``(a+)+$`` on one line would block every thread of the master
        pattern, why = compile_pattern(text)
        if why:
            raise Invalid(f"searchText is not a regular expression (RE2 syntax): {why}")
        if pattern.programsize > _LARGEST_PROGRAM:
            raise Invalid("the regular expression in searchText is too large", fix="Use fewer and smaller repetitions.")
        lines_read = read(replace(asked, limit=None))  # the limit applies to lines that pass all filters
        everything = (line for line in lines_read if line is None or pattern.search(line.message) is not None)
        found = islice(everything, asked.limit) if asked.limit is not None else everything
    if not asked.follow:
        return lines((shape(line) for line in found if line is not None), follow=False)
    place = ExitStack()  # reserves one of the places for waiting requests until the stream ends
    if not place.enter_context(request.waits.one()):
        return failure(503, "too many logs are being followed already, try again")
    return lines((None if line is None else shape(line) for line in found), follow=True, done=place.close)


def _shared(line: LogLine) -> Dict:
    """Render the fields that log lines of trials and tasks have in common.

    Clients print ``message`` as it is, so it is formatted as by Determined's master. ``log`` is the
    plain text.
    """
    # `det trial logs` prints the text to a terminal, which ignores a NUL
    text = "\0".join(strip_control(part) for part in line.message.split("\0"))
    rank = "" if line.rank is None else f"[rank={line.rank}] "
    text = shown = text.removeprefix(rank)
    level = line.level if line.level in _LEVELS else "INFO"  # trials send arbitrary levels
    found = None if line.has_level else _WRITTEN_LEVEL.match(text)
    if line.has_level:
        shown = f"{level}: {text}"
    elif found is not None:
        text = text[found.end() :]
        shown = f"{found[1]}: {text}"
    time = when(line.time, "microseconds")
    return {
        **fields(line, "id", "source", "stdtype"),
        "timestamp": time,
        "message": f"[{time}] {line.container_id[:8]:8} {rank}|| {shown}\n",
        "log": text,
        "agentId": line.agent_id or None,
        "containerId": line.container_id or None,
        "level": f"LOG_LEVEL_{level}",
        "rankId": line.rank,
    }


def _trial_logs(request: Request) -> Response | StreamingResponse:
    return _stream(
        request,
        lambda asked: request.master.trials.logs(request.number, asked),
        lambda line: {**_shared(line), "trialId": line.trial_id},
    )


def _task_logs(request: Request) -> Response | StreamingResponse:
    return _stream(
        request,
        lambda asked: request.master.tasks.logs(request.args["taskId"], asked),
        lambda line: {**_shared(line), **fields(line, "task_id", "allocation_id")},
    )


def _master_logs(request: Request) -> Response | StreamingResponse:
    """Return entries of the master's log; a negative offset counts from the end."""
    if request.query_flag("follow"):
        return failure(501, "the master's log cannot be followed over HTTP: run 'zero-trial master logs'")
    entries = list(_entries(request.master.machine.log_file))
    offset, limit = request.query_number("offset"), request.query_number("limit")
    kept = entries[offset:] if offset < 0 else entries[min(offset, len(entries)) :]
    return lines(({"logEntry": entry} for entry in (kept[:limit] if limit > 0 else kept)), follow=False)


def _entries(file: Path) -> Iterator[Dict]:
    """Yield the last entries of the log; a line without a time belongs to the previous entry."""
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, 2) - _TAIL)
            stream.seek(start)
            text = stream.read(_TAIL).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    entry: Dict | None = None
    number = 0
    for line in text.splitlines():
        matched = _ENTRY.match(line)
        if matched is None:
            if entry is not None:
                entry["message"] += "\n" + line
            continue
        if entry is not None:
            yield entry
        level = matched[2] if matched[2] in _LEVELS else "INFO"
        entry = {"id": number, "timestamp": matched[1], "level": f"LOG_LEVEL_{level}", "message": matched[3]}
        number += 1
    if entry is not None:
        yield entry


def _post_logs(request: Request) -> None:
    """Store the log lines that core_v2 sends for an unmanaged trial."""
    by_task: dict[str, list[dict[str, object]]] = {}
    for line in request.list_body():
        if not isinstance(line, dict):
            raise Invalid("logs must be a list of lines")
        task_id = line.get("task_id")
        if not isinstance(task_id, str):
            raise Invalid("a log line needs a task_id")
        request.own(task_id=task_id)
        rank = line.get("rank", line.get("rankId"))
        line = {**line, "rankId": None if rank is None else whole(rank, "rankId")}
        by_task.setdefault(task_id, []).append(line)
    for task_id, some in by_task.items():
        request.master.tasks.append_logs(task_id, some)


_AGENT = "/api/v1/agents/{agentId}"
_SLOT = f"{_AGENT}/slots/{{slotId:int}}"

ROUTES = (
    Route("GET", "/info", _info, AuthLevel.PUBLIC),
    # Clients request this before they log in, as on Determined's master; it reveals no more than
    # /info.
    Route("GET", "/api/v1/master", _master, AuthLevel.PUBLIC),
    Route("GET", "/api/v1/master/config", _master_config),
    Route("GET", "/api/v1/agents", lambda call: call.listed("agents", _render_agents(call), dict)),
    Route("POST", f"{_AGENT}/enable", _switch_agent(True)),
    Route("POST", f"{_AGENT}/disable", _switch_agent(False)),
    Route("POST", f"{_SLOT}/enable", _switch_slot(True)),
    Route("POST", f"{_SLOT}/disable", _switch_slot(False)),
    Route(
        "GET",
        "/api/v1/resource-pools",
        lambda call: call.listed("resourcePools", call.master.machine.resource_pools(), _resource_pool_json),
    ),
    Route("GET", "/api/v1/workspaces/{workspaceId:int}/available-resource-pools", _pools_of_workspace),
    Route("GET", "/api/v1/job-queues-v2", _jobs),
    Route("POST", "/api/v1/job-queues", _update_jobs),
    Route("POST", "/task-logs", _post_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/trials/{trialId:int}/logs", _trial_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/tasks/{taskId}/logs", _task_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/master/logs", _master_logs),
)
