"""Routes of the machine: who the master is, its slots, its queue, and the one workspace and project that there are."""

from __future__ import annotations

from typing import Any

from zero_trial.master.errors import Invalid, NotFound, Unsupported
from zero_trial.master.http import render_machine as render
from zero_trial.master.http.render import POOL, PROJECT_ID, WORKSPACE_ID
from zero_trial.master.http.request import Request, real, whole
from zero_trial.master.http.response import Response, ok
from zero_trial.master.http.router import AuthLevel, Route
from zero_trial.master.records import AllocationState, ExperimentPatch, SlotInfo


def info(call: Request) -> Response:
    """GET /info."""
    return ok(render.info(call.cluster.machine.info()))


def master(call: Request) -> Response:
    """GET /api/v1/master."""
    return ok(render.master(call.cluster.machine.info()))


def master_config(call: Request) -> Response:
    """GET /api/v1/master/config: what of a real master's configuration has a meaning here."""
    pools = [
        {"pool_name": pool.name, "description": pool.description} for pool in call.cluster.machine.resource_pools()
    ]
    record = call.cluster.machine.info()
    return ok(
        {
            "config": {
                "cluster_name": record.cluster_name,
                "resource_manager": {"type": "agent", "scheduler": {"type": "priority", "preemption": False}},
                "resource_pools": pools,
                "telemetry": {"enabled": False},
            }
        }
    )


def _agents(call: Request) -> list[render.Dict]:
    running = [
        allocation
        for task in call.cluster.tasks.tasks()
        for allocation in task.allocations
        if allocation.state in (AllocationState.STARTING, AllocationState.RUNNING)
    ]
    return [render.agent(agent, running) for agent in call.cluster.machine.agents()]


def agents(call: Request) -> Response:
    """GET /agents."""
    page, pagination = call.page(_agents(call))
    return ok({"agents": page, "pagination": pagination})


def _agent(call: Request) -> render.Dict:
    for agent in _agents(call):
        if agent["id"] == call.text("agentId"):
            return agent
    raise NotFound(f"there is no agent {call.text('agentId')[:60]!r}")


def agent(call: Request) -> Response:
    """GET /agents/{agentId}."""
    return ok({"agent": _agent(call)})


def slots(call: Request) -> Response:
    """GET /agents/{agentId}/slots."""
    return ok({"slots": list(_agent(call)["slots"].values())})


def slot(call: Request) -> Response:
    """GET /agents/{agentId}/slots/{slotId}."""
    found = _agent(call)["slots"].get(str(call.number("slotId")))
    if found is None:
        raise NotFound(f"there is no slot {call.number('slotId')}")
    return ok({"slot": found})


def switch_slot(enabled: bool) -> Any:
    """POST /agents/{agentId}/slots/{slotId}/enable and /disable."""

    def action(call: Request) -> Response:
        _agent(call)
        changed: SlotInfo = call.cluster.machine.set_slot_enabled(call.number("slotId"), enabled)
        return ok({"slot": render.slot(changed, None)})

    return action


def switch_agent(enabled: bool) -> Any:
    """POST /agents/{agentId}/enable and /disable: all its slots."""

    def action(call: Request) -> Response:
        for each in _agent(call)["slots"].values():
            call.cluster.machine.set_slot_enabled(int(each["id"]), enabled)
        return ok({"agent": {**_agent(call), "enabled": enabled}})

    return action


def resource_pools(call: Request) -> Response:
    """GET /resource-pools."""
    page, pagination = call.page(call.cluster.machine.resource_pools())
    return ok({"resourcePools": [render.resource_pool(pool) for pool in page], "pagination": pagination})


def pool_bindings(call: Request) -> Response:
    """GET /resource-pools/{pool}/workspace-bindings: the one pool serves the one workspace."""
    _require_pool(call, call.text("pool"))
    page, pagination = call.page([WORKSPACE_ID])
    return ok({"workspaceIds": list(page), "pagination": pagination})


def _jobs(call: Request) -> list[render.Dict]:
    pool = call.request.first("resourcePool")
    if pool:
        _require_pool(call, pool)
    ids = {user.name: user.id for user in call.cluster.accounts.users()}
    jobs = [render.job(job, pool=pool or POOL, user_id=ids.get(job.owner, 0)) for job in call.cluster.machine.jobs()]
    return jobs[::-1] if call.request.first("orderBy") == "ORDER_BY_DESC" else jobs


def _require_pool(call: Request, name: str) -> None:
    if name not in {pool.name for pool in call.cluster.machine.resource_pools()}:
        raise NotFound(f"there is no resource pool {name[:60]!r}")


def jobs(call: Request) -> Response:
    """GET /job-queues."""
    page, pagination = call.page(_jobs(call))
    return ok({"jobs": page, "pagination": pagination})


def jobs_v2(call: Request) -> Response:
    """GET /job-queues-v2."""
    page, pagination = call.page(_jobs(call))
    return ok({"jobs": [{"full": job} for job in page], "pagination": pagination})


def update_jobs(call: Request) -> Response:
    """POST /job-queues: priorities and weights. All updates are understood before the first is done."""
    updates = call.body().get("updates")
    if not isinstance(updates, list) or not all(isinstance(update, dict) for update in updates):
        raise Invalid("updates must be a list")
    numbers = {job.id: job.experiment_id for job in call.cluster.machine.jobs()}
    changes = [(_job_number(numbers, update), _job_change(update)) for update in updates]
    for number, change in changes:
        call.cluster.experiments.patch(number, ExperimentPatch(resources=change))
    return Response()


def _job_number(numbers: dict[str, int], update: dict[str, Any]) -> int:
    name = update.get("jobId")
    if not isinstance(name, str) or name not in numbers:
        raise NotFound(f"there is no job {str(name)[:60]!r} in the queue")
    return numbers[name]


def _job_change(update: dict[str, Any]) -> dict[str, float | None]:
    if update.get("aheadOf") or update.get("behindOf"):
        raise Unsupported("jobs are not moved ahead of or behind others; give the job another priority")
    if update.get("resourcePool"):
        raise Unsupported("there is one resource pool; jobs stay in it")
    change: dict[str, float | None] = {}
    if update.get("priority") is not None:
        change["priority"] = whole(update["priority"], "priority")
    if update.get("weight") is not None:
        change["weight"] = real(update["weight"], "weight")
    return change


def _workspace(call: Request) -> render.Dict:
    return render.workspace(len(call.cluster.experiments.all()))


def _project(call: Request) -> render.Dict:
    everything = call.cluster.experiments.all()
    return render.project(len(everything), sum(not each.state.final for each in everything))


def workspaces(call: Request) -> Response:
    """GET /workspaces."""
    found = _workspace(call)
    wanted = call.request.first("name") or call.request.first("nameCaseSensitive")
    page, pagination = call.page([found] if wanted.lower() in found["name"].lower() else [])
    return ok({"workspaces": list(page), "pagination": pagination})


def workspace(call: Request) -> Response:
    """GET /workspaces/{workspaceId}."""
    _require_one(call.number("workspaceId"), WORKSPACE_ID, "workspace")
    return ok({"workspace": _workspace(call)})


def projects(call: Request) -> Response:
    """GET /workspaces/{workspaceId}/projects."""
    _require_one(call.number("workspaceId"), WORKSPACE_ID, "workspace")
    page, pagination = call.page([_project(call)])
    return ok({"projects": list(page), "pagination": pagination})


def project(call: Request) -> Response:
    """GET /projects/{projectId}."""
    _require_one(call.number("projectId"), PROJECT_ID, "project")
    return ok({"project": _project(call)})


def _require_one(number: int, only: int, noun: str) -> None:
    if number != only:
        raise NotFound(f"there is one {noun} here, number {only}")


_AGENT = "/api/v1/agents/{agentId}"
_SLOT = f"{_AGENT}/slots/{{slotId:int}}"

ROUTES = (
    Route("GET", "/info", info, AuthLevel.ANYBODY),
    # Clients ask this before they log in, as they may of a real master; it tells what /info tells.
    Route("GET", "/api/v1/master", master, AuthLevel.ANYBODY),
    Route("GET", "/api/v1/master/config", master_config),
    Route("GET", "/api/v1/agents", agents),
    Route("GET", _AGENT, agent),
    Route("POST", f"{_AGENT}/enable", switch_agent(True)),
    Route("POST", f"{_AGENT}/disable", switch_agent(False)),
    Route("GET", f"{_AGENT}/slots", slots),
    Route("GET", _SLOT, slot),
    Route("POST", f"{_SLOT}/enable", switch_slot(True)),
    Route("POST", f"{_SLOT}/disable", switch_slot(False)),
    Route("GET", "/api/v1/resource-pools", resource_pools),
    Route("GET", "/api/v1/resource-pools/{pool}/workspace-bindings", pool_bindings),
    Route("GET", "/api/v1/job-queues", jobs),
    Route("GET", "/api/v1/job-queues-v2", jobs_v2),
    Route("POST", "/api/v1/job-queues", update_jobs),
    Route("GET", "/api/v1/workspaces", workspaces),
    Route("GET", "/api/v1/workspaces/{workspaceId:int}", workspace),
    Route("GET", "/api/v1/workspaces/{workspaceId:int}/projects", projects),
    Route("GET", "/api/v1/projects/{projectId:int}", project),
)
