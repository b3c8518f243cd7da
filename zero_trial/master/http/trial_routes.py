"""Routes of trials, their tasks and allocations, and of the harness's reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from zero_trial.master.agent.resources import POOL
from zero_trial.master.http.checkpoint_routes import checkpoint_workload_json
from zero_trial.master.http.messages import (
    AuthLevel,
    BadRequest,
    Dict,
    Request,
    Route,
    StreamingResponse,
    fields,
    lines,
    listing,
    packed,
    real,
    when,
    whole,
)
from zero_trial.master.records import (
    Allocation,
    AllocationState,
    Checkpoint,
    Invalid,
    MetricReport,
    NotFound,
    Task,
    Trial,
    parse_time,
)
from zero_trial.master.store import trial_rows

_ROOT = "/api/v1/trials"
_PER_LINE = 100  # metric reports per line of a stream
_WORKLOAD_FILTERS = {
    "FILTER_OPTION_CHECKPOINT": ("checkpoint",),
    "FILTER_OPTION_VALIDATION": ("validation",),
    "FILTER_OPTION_CHECKPOINT_OR_VALIDATION": ("checkpoint", "validation"),
}


def _workloads(request: Request) -> StreamingResponse:
    batches = request.query_flag("includeBatchMetrics")
    kinds = _WORKLOAD_FILTERS.get(request.first("filter"))
    total, found = request.master.trials.workloads(request.number, kinds, include_batch_metrics=batches)
    pagination = request.window(total)
    start, end = pagination["startIndex"], pagination["endIndex"]
    if request.descending:
        page: Iterable[Any] = reversed(list(islice(found, total - end, total - start)))
    else:
        page = islice(found, start, end)
    return listing("workloads", map(workload_json, page), pagination=pagination)


def _metrics(group: str | None) -> Any:
    """Stream all reports of the requested trials."""

    def action(request: Request) -> StreamingResponse:
        wanted = group or request.first("group") or None
        numbers = [whole(text, "trialIds") for text in request.query_all("trialIds")]
        for number in numbers:
            request.own(trial_id=number)
            request.master.trials.get(number, derived=False)
        return lines(_reports(request, numbers, wanted), follow=False)

    return action


def _reports(request: Request, numbers: list[int], group: str | None) -> Iterator[Mapping[str, Any]]:
    for number in numbers:
        reports = request.master.trials.metrics(number, group)
        while some := list(islice(reports, _PER_LINE)):
            yield {"metrics": [report_json(report) for report in some]}


def _report_metrics(request: Request) -> None:
    """Store a report of metrics. This is the most frequently called route."""
    body = request.body()
    report, group = body.get("metrics"), body.get("group")
    if not isinstance(report, dict) or not isinstance(group, str) or not group:
        raise BadRequest(400, "a report needs a group and metrics")
    values = report.get("metrics")
    averages = values.get("avgMetrics") if isinstance(values, dict) else None
    number = request.number
    if not isinstance(values, dict) or not isinstance(averages, dict) or report.get("trialId", number) != number:
        raise BadRequest(400, "a report needs metrics.avgMetrics and the trial's own id")
    batches = values.get("batchMetrics")
    if batches is not None and not (isinstance(batches, list) and all(isinstance(batch, dict) for batch in batches)):
        raise BadRequest(400, "metrics.batchMetrics must be a list of objects, one per batch")
    steps, reported = report.get("stepsCompleted"), report.get("reportTime")
    request.master.trials.report_metrics(
        number,
        run_id=whole(report.get("trialRunId"), "trialRunId"),
        group=group,
        steps_completed=None if steps is None else whole(steps, "stepsCompleted"),
        metrics=averages,
        batch_metrics=batches,
        reported=parse_time(reported, "reportTime") if isinstance(reported, str) and reported else None,
    )


def _report_progress(request: Request) -> None:
    fraction = real(request.body().get("progress"), "progress")  # fraction of the trial, with or without "isRaw"
    request.master.trials.report_progress(request.number, fraction)


def _runner_metadata(request: Request) -> None:
    state = request.body().get("state")
    request.master.trials.change(request.number, runner_state=state[:1000] if isinstance(state, str) else "")


def _early_exit(request: Request) -> None:
    reason = request.body().get("reason")
    if not isinstance(reason, str):
        raise Invalid("reason must be one of Determined's EXITED_REASON_ names")
    request.master.trials.early_exit(request.number, reason)


def _start_run(request: Request) -> Dict:
    """Accept that a rank starts to report. Its ``runId`` is the trial's id."""
    body = request.body()
    number, section = whole(body.get("runId"), "runId"), body.get("checkpointStorage")
    request.own(trial_id=number)
    request.master.trials.start_run(number)
    if not isinstance(section, dict | None):
        raise Invalid("checkpointStorage must be an object")
    return {"storageId": None if section is None else request.master.checkpoints.storage_number(section)}


def _set_metadata(request: Request) -> Dict:
    metadata = request.body().get("metadata")
    if not isinstance(metadata, dict):
        raise Invalid("metadata must be an object")
    request.master.trials.change(request.number, metadata=metadata)
    return {"metadata": metadata}


# -- unmanaged trials


def _put(request: Request) -> Dict:
    """Create an unmanaged trial, or return the experiment's trial with this external id."""
    body = request.body()
    inner = body.get("createTrialRequest")
    if not isinstance(inner, dict):
        raise Invalid("createTrialRequest must be an object")
    return _unmanaged(request, inner, external_id(body.get("externalTrialId")))


def _unmanaged(request: Request, body: Mapping[str, Any], name: str | None = None) -> Dict:
    hparams = body.get("hparams")
    if not body.get("unmanaged"):
        raise Invalid("only unmanaged trials can be created from outside", where="unmanaged")
    if not isinstance(hparams, dict | None):
        raise Invalid("hparams must be an object")
    number = whole(body.get("experimentId"), "experimentId")
    return {"trial": trial_json(request.master.unmanaged.create(number, hparams or {}, name))}


def external_id(value: Any) -> str:
    """Return the user's name for an unmanaged experiment or trial. Raises Invalid."""
    if not isinstance(value, str) or not value or len(value) > 256 or not value.isprintable():
        raise Invalid("an external id must be 1 to 256 printable characters", got=repr(value)[:60])
    return value


def _start(request: Request) -> Dict:
    run = request.master.unmanaged.start(request.number, resume=bool(request.body().get("resume")))
    return {"trialRunId": run.run_id, **fields(run, "latest_checkpoint", "steps_completed")}


def _patch(request: Request) -> Dict:
    """Record a heartbeat of an unmanaged trial, optionally with its state."""
    state = request.body().get("state")
    if not isinstance(state, str | None):
        raise Invalid("state must be a string")
    name = None if state is None else state.removeprefix("STATE_")
    return {"trial": trial_json(request.master.unmanaged.patch(request.number, name))}


# -- responses, in the format of Determined's bindings

# names of groups in a trial's summary
_OWN_GROUPS = {"training": "avg_metrics", "validation": "validation_metrics"}


def trial_json(record: Trial) -> Dict:
    """Render a trialv1Trial."""
    same = ("id", "experiment_id", "hparams", "restarts", "checkpoint_count", "task_id", "log_policy_matched")
    return {
        **fields(record, *same),
        "state": f"STATE_{record.shown_state or record.state.value}",
        "startTime": when(record.created),
        "endTime": when(record.ended),
        "totalBatchesProcessed": record.steps_completed,
        "bestValidation": metrics_json(record.best_validation),
        "latestValidation": metrics_json(record.latest_validation),
        "searcherMetricValue": record.searcher_metric,
        "summaryMetrics": {_OWN_GROUPS.get(group, group): value for group, value in record.summary_metrics.items()},
        "runnerState": record.runner_state or None,
        "wallClockTime": record.wall_clock,
        "warmStartCheckpointUuid": record.warm_start_checkpoint,
        "totalCheckpointSize": str(record.checkpoint_size),
        "taskIds": list(record.task_ids or (record.task_id,)),
        "metadata": None,
        "externalTrialId": record.external_id,
    }


def metrics_json(report: MetricReport | None) -> Dict | None:
    """Render a v1MetricsWorkload."""
    if report is None:
        return None
    return {
        "endTime": when(report.reported),
        "metrics": {"avgMetrics": report.metrics, "batchMetrics": report.batch_metrics or []},  # protobuf: a list
        "numInputs": 0,
        "totalBatches": report.steps_completed or 0,
    }


def report_json(report: MetricReport) -> Dict:
    """Render a v1MetricsReport."""
    own = {"avg_metrics": report.metrics, "batch_metrics": report.batch_metrics}
    return {
        **fields(report, "id", "trial_id", "group", "archived"),
        "trialRunId": report.run_id,
        "totalBatches": report.steps_completed or 0,
        "metrics": {"validation_metrics": report.metrics} if report.group == "validation" else own,
        "endTime": when(report.reported),
    }


def workload_json(record: MetricReport | Checkpoint) -> Dict:
    """Render a v1WorkloadContainer."""
    if isinstance(record, Checkpoint):
        return {"checkpoint": checkpoint_workload_json(record)}
    return {record.group: metrics_json(record)}


_MAX_POLL = 60.0  # maximum seconds of a long poll
_CROWDED_POLL = 1.0  # maximum seconds if too many requests are waiting already


def _accelerator_data(request: Request) -> None:
    """Accept and ignore data that the harness sends at the start of each run."""
    request.body()


def _rendezvous(request: Request) -> Dict:
    found = request.master.tasks.allocation(request.args["allocationId"])
    if found.resources_id != request.args["resourcesId"]:
        raise NotFound(f"resources {request.args['resourcesId'][:60]} not found")
    return {"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": [len(found.slots)]}}


def _all_gather(request: Request) -> Dict:
    """Wait until all containers of an allocation have sent their data, and return all the data."""
    body = request.body()
    name, peers = body.get("requestUuid"), body.get("numPeers")
    if not isinstance(name, str) or not isinstance(peers, int) or peers < 1:
        raise Invalid("all_gather needs a requestUuid and a positive numPeers")
    with request.waits.one() as room:
        wait = _MAX_POLL if room else _CROWDED_POLL
        found = request.master.tasks.all_gather(request.args["allocationId"], name, peers, body.get("data"), wait)
    return {"data": found}


def _preemption(request: Request) -> Dict:
    """Wait until the allocation is preempted: a long poll, shorter if too many are waiting."""
    text = request.first("timeout_seconds") or request.first("timeoutSeconds") or "60"
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not timeout >= 0:
        raise Invalid("timeout_seconds must be a number of seconds", got=text[:40])
    with request.waits.one() as room:
        wait = min(timeout, _MAX_POLL if room else _CROWDED_POLL)
        return {"preempt": request.master.tasks.preemption_signal(request.args["allocationId"], wait)}


def _list_tasks(request: Request) -> Dict:
    master = request.master
    found = {
        allocation.id: allocation_summary_json(task, allocation, master.machine.nodes_of(allocation))
        for task in master.tasks.tasks()
        for allocation in task.allocations
        if allocation.ended is None
    }
    return {"allocationIdToSummary": found}


# -- responses, in the format of Determined's bindings


def allocation_summary_json(task: Task, allocation: Allocation, nodes: Sequence[str]) -> Dict:
    """Render a v1AllocationSummary."""
    slots, priority = task.resources.get("slots_per_trial"), task.resources.get("priority")
    resources = {
        **fields(allocation, "resources_id", "container_id"),
        "resourcesType": "docker-container",
        "allocationId": allocation.id,
        "agentDevices": {name: {"devices": []} for name in nodes},
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
        "state": f"STATE_{record.state.value}",
        "startTime": when(record.started),
        "endTime": when(record.ended),
        "slots": len(record.slots),
        "statusCode": record.exit_code,
    }


def _task_json(record: Task) -> Dict:
    """Render a v1Task."""
    return {
        "taskId": record.id,
        "taskType": "TASK_TYPE_TRIAL",
        "startTime": when(record.started),
        "endTime": when(record.ended),
        "allocations": [allocation_json(each) for each in record.allocations],
    }


_ONE = f"{_ROOT}/{{trialId:int}}"
_METADATA = "/api/v1/runs/{trialId:int}/metadata"
_TASK = "/api/v1/tasks/{taskId}"
_ALLOCATION = "/api/v1/allocations/{allocationId}"


ROUTES = (
    Route("GET", _ONE, lambda call: {"trial": trial_json(call.master.trials.get(call.number))}, AuthLevel.BOTH),
    Route("POST", _ROOT, lambda call: _unmanaged(call, call.body())),
    Route("PUT", _ROOT, _put),
    Route("POST", f"{_ONE}/start", _start),
    Route("PATCH", _ONE, _patch),
    Route("POST", f"{_ONE}/kill", lambda call: call.master.trials.kill(call.number)),
    Route("GET", f"{_ONE}/workloads", _workloads, AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/metrics/trial_metrics", _metrics(None), AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/metrics/training_metrics", _metrics("training"), AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/metrics/validation_metrics", _metrics("validation"), AuthLevel.BOTH),
    Route("POST", f"{_ONE}/metrics", _report_metrics, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/progress", _report_progress, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/runner/metadata", _runner_metadata, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/early_exit", _early_exit, AuthLevel.TASK),
    Route("POST", "/api/v1/runs/start", _start_run, AuthLevel.BOTH),
    Route(
        "GET",
        _METADATA,
        lambda call: {"metadata": call.master.state.read(trial_rows.metadata, call.number)},
        AuthLevel.BOTH,
    ),
    Route("POST", _METADATA, _set_metadata, AuthLevel.BOTH),
    Route("GET", "/api/v1/tasks", _list_tasks),
    Route("GET", _TASK, lambda call: {"task": _task_json(call.master.tasks.task(call.args["taskId"]))}, AuthLevel.BOTH),
    Route(
        "GET",
        f"{_TASK}/context_directory",
        lambda call: packed(call.master.tasks.context(call.args["taskId"])),
        AuthLevel.TASK,
    ),
    Route("POST", f"{_ALLOCATION}/acceleratorData", _accelerator_data, AuthLevel.TASK),
    Route("GET", f"{_ALLOCATION}/resources/{{resourcesId}}/rendezvous", _rendezvous, AuthLevel.TASK),
    Route("GET", f"{_ALLOCATION}/signals/preemption", _preemption, AuthLevel.TASK),
    Route(
        "POST",
        f"{_ALLOCATION}/signals/ack_preemption",
        lambda call: call.master.tasks.ack_preemption(call.args["allocationId"]),
        AuthLevel.TASK,
    ),
    Route("POST", f"{_ALLOCATION}/all_gather", _all_gather, AuthLevel.TASK),
)
