"""Routes of trials: what is known of them, and what the harness reports while one runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from zero_trial.master.http.messages import (
    AuthLevel,
    BadRequest,
    Dict,
    Request,
    Response,
    Route,
    StreamingResponse,
    lines,
    listing,
    maybe_when,
    ok,
    real,
    when,
    whole,
)
from zero_trial.master.http.routes.checkpoint_routes import checkpoint_workload_json
from zero_trial.master.records import (
    Checkpoint,
    Invalid,
    MetricReport,
    Trial,
    parse_time,
)

_ROOT = "/api/v1/trials"
_PER_LINE = 100  # metric reports that are sent in one line of a stream
_WORKLOAD_FILTERS = {
    "FILTER_OPTION_CHECKPOINT": ("checkpoint",),
    "FILTER_OPTION_VALIDATION": ("validation",),
    "FILTER_OPTION_CHECKPOINT_OR_VALIDATION": ("checkpoint", "validation"),
}


def _get(request: Request) -> Response:
    return ok({"trial": trial_json(request.master.trials.get(request.numbers["trialId"]))})


def _kill(request: Request) -> Response:
    request.master.trials.kill(request.numbers["trialId"])
    return Response()


def _workloads(request: Request) -> StreamingResponse:
    batches = request.query_flag("includeBatchMetrics")
    kinds = _WORKLOAD_FILTERS.get(request.first("filter"))
    asked = (request.numbers["trialId"], *(() if kinds is None else (kinds,)))
    total, found = request.master.trials.workloads(*asked, include_batch_metrics=batches)
    pagination = request.window(total)
    start, end = pagination["startIndex"], pagination["endIndex"]
    if request.first("orderBy") == "ORDER_BY_DESC":
        page: Iterable[Any] = reversed(list(islice(found, total - end, total - start)))
    else:
        page = islice(found, start, end)
    return listing("workloads", map(workload_json, page), pagination=pagination)


def _metrics(group: str | None) -> Any:
    """Stream every report of the trials asked for."""

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


def _report_metrics(request: Request) -> Response:
    """Store a report of metrics. This is the busiest route of all."""
    body = request.body()
    report, group = body.get("metrics"), body.get("group")
    if not isinstance(report, dict) or not isinstance(group, str) or not group:
        raise BadRequest(400, "a report has a group and metrics")
    values = report.get("metrics")
    averages = values.get("avgMetrics") if isinstance(values, dict) else None
    number = request.numbers["trialId"]
    if not isinstance(values, dict) or not isinstance(averages, dict) or report.get("trialId", number) != number:
        raise BadRequest(400, "a report has metrics.avgMetrics and the trial's own id")
    batches = values.get("batchMetrics")
    if batches is not None and not (isinstance(batches, list) and all(isinstance(batch, dict) for batch in batches)):
        raise BadRequest(400, "metrics.batchMetrics is a list of objects, one of each batch")
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
    return Response()


def _report_progress(request: Request) -> Response:
    fraction = real(request.body().get("progress"), "progress")  # of the trial, with "isRaw" and without
    request.master.trials.report_progress(request.numbers["trialId"], fraction)
    return Response()


def _runner_metadata(request: Request) -> Response:
    state = request.body().get("state")
    request.master.trials.set_runner_state(request.numbers["trialId"], state[:1000] if isinstance(state, str) else "")
    return Response()


def _early_exit(request: Request) -> Response:
    reason = request.body().get("reason")
    if not isinstance(reason, str):
        raise Invalid("reason must be one of Determined's EXITED_REASON_ names")
    request.master.trials.early_exit(request.numbers["trialId"], reason)
    return Response()


def _start_run(request: Request) -> Response:
    """Note that a rank begins to report. Its ``runId`` is the trial's id."""
    body = request.body()
    number, section = whole(body.get("runId"), "runId"), body.get("checkpointStorage")
    request.own(trial_id=number)
    request.master.trials.start_run(number)
    if section is None:
        return ok({"storageId": None})
    if not isinstance(section, dict):
        raise Invalid("checkpointStorage must be an object")
    return ok({"storageId": request.master.checkpoints.storage_number(section)})


def _get_metadata(request: Request) -> Response:
    return ok({"metadata": dict(request.master.trials.metadata(request.numbers["trialId"]))})


def _set_metadata(request: Request) -> Response:
    metadata = request.body().get("metadata")
    if not isinstance(metadata, dict):
        raise Invalid("metadata must be an object")
    request.master.trials.set_metadata(request.numbers["trialId"], metadata)
    return ok({"metadata": metadata})


# -- unmanaged trials


def _create(request: Request) -> Response:
    return ok({"trial": trial_json(_unmanaged(request, request.body(), None))})


def _put(request: Request) -> Response:
    """Create an unmanaged trial, or find the one of this name in its experiment."""
    body = request.body()
    inner = body.get("createTrialRequest")
    if not isinstance(inner, dict):
        raise Invalid("createTrialRequest must be an object")
    return ok({"trial": trial_json(_unmanaged(request, inner, external_id(body.get("externalTrialId"))))})


def _unmanaged(request: Request, body: Mapping[str, Any], name: str | None) -> Trial:
    hparams = body.get("hparams")
    if not body.get("unmanaged"):
        raise Invalid("only unmanaged trials are created from outside", where="unmanaged")
    if not isinstance(hparams, dict | None):
        raise Invalid("hparams must be an object")
    return request.master.unmanaged.create(whole(body.get("experimentId"), "experimentId"), hparams or {}, name)


def external_id(value: Any) -> str:
    """Return a name that its user has given to an unmanaged experiment or trial. Raises Invalid."""
    if not isinstance(value, str) or not value or len(value) > 256 or not value.isprintable():
        raise Invalid("an external id is 1 to 256 printable characters", got=repr(value)[:60])
    return value


def _start(request: Request) -> Response:
    run = request.master.unmanaged.start(request.numbers["trialId"], resume=bool(request.body().get("resume")))
    return ok(
        {
            "trialRunId": run.run_id,
            "latestCheckpoint": run.latest_checkpoint,
            "stepsCompleted": run.steps_completed,
        }
    )


def _patch(request: Request) -> Response:
    """Take a heartbeat of an unmanaged trial, with its state or without."""
    state = request.body().get("state")
    if not isinstance(state, str | None):
        raise Invalid("state must be a text")
    name = None if state is None else state.removeprefix("STATE_")
    return ok({"trial": trial_json(request.master.unmanaged.patch(request.numbers["trialId"], name))})


# -- what the answers contain, in the shapes of Determined's bindings

# names in a trial's summary
_OWN_GROUPS = {"training": "avg_metrics", "validation": "validation_metrics"}


def trial_json(record: Trial) -> Dict:
    """Render a trialv1Trial."""
    return {
        "id": record.id,
        "experimentId": record.experiment_id,
        "state": f"STATE_{record.shown_state or record.state.value}",
        "startTime": when(record.created),
        "endTime": maybe_when(record.ended),
        "hparams": dict(record.hparams),
        "restarts": record.restarts,
        "totalBatchesProcessed": record.steps_completed,
        "bestValidation": _maybe_metrics(record.best_validation),
        "latestValidation": _maybe_metrics(record.latest_validation),
        "searcherMetricValue": record.searcher_metric,
        "summaryMetrics": {_OWN_GROUPS.get(group, group): value for group, value in record.summary_metrics.items()},
        "runnerState": record.runner_state or None,
        "wallClockTime": record.wall_clock,
        "warmStartCheckpointUuid": record.warm_start_checkpoint,
        "checkpointCount": record.checkpoint_count,
        "totalCheckpointSize": str(record.checkpoint_size),
        "taskId": record.task_id,
        "taskIds": list(record.task_ids or (record.task_id,)),
        "logPolicyMatched": record.log_policy_matched,
        "metadata": None,
        "externalTrialId": record.external_id,
    }


def metrics_json(report: MetricReport) -> Dict:
    """Render a v1MetricsWorkload."""
    return {
        "endTime": when(report.reported),
        "metrics": {
            "avgMetrics": dict(report.metrics),
            "batchMetrics": report.batch_metrics or [],
        },  # a list by protobuf
        "numInputs": 0,
        "totalBatches": report.steps_completed or 0,
    }


def _maybe_metrics(report: MetricReport | None) -> Dict | None:
    return None if report is None else metrics_json(report)


def report_json(report: MetricReport) -> Dict:
    """Render a v1MetricsReport."""
    return {
        "trialId": report.trial_id,
        "trialRunId": report.run_id,
        "group": report.group,
        "totalBatches": report.steps_completed or 0,
        "metrics": {"validation_metrics": dict(report.metrics)}
        if report.group == "validation"
        else {"avg_metrics": dict(report.metrics), "batch_metrics": report.batch_metrics},
        "endTime": when(report.reported),
        "id": report.id,
        "archived": report.archived,
    }


def workload_json(record: MetricReport | Checkpoint) -> Dict:
    """Render a v1WorkloadContainer."""
    if isinstance(record, Checkpoint):
        return {"checkpoint": checkpoint_workload_json(record)}
    return {record.group: metrics_json(record)}


_ONE = f"{_ROOT}/{{trialId:int}}"

ROUTES = (
    Route("GET", _ONE, _get, AuthLevel.BOTH),
    Route("POST", _ROOT, _create),
    Route("PUT", _ROOT, _put),
    Route("POST", f"{_ONE}/start", _start),
    Route("PATCH", _ONE, _patch),
    Route("POST", f"{_ONE}/kill", _kill),
    Route("GET", f"{_ONE}/workloads", _workloads, AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/metrics/trial_metrics", _metrics(None), AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/metrics/training_metrics", _metrics("training"), AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/metrics/validation_metrics", _metrics("validation"), AuthLevel.BOTH),
    Route("POST", f"{_ONE}/metrics", _report_metrics, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/progress", _report_progress, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/runner/metadata", _runner_metadata, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/early_exit", _early_exit, AuthLevel.TASK),
    Route("POST", "/api/v1/runs/start", _start_run, AuthLevel.BOTH),
    Route("GET", "/api/v1/runs/{trialId:int}/metadata", _get_metadata, AuthLevel.BOTH),
    Route("POST", "/api/v1/runs/{trialId:int}/metadata", _set_metadata, AuthLevel.BOTH),
)
