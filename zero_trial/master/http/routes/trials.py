"""Routes of trials: what is known of them, and what the harness reports while one runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from zero_trial.master.http.request import AuthLevel, BadRequest, Request, Route, moment, real, whole
from zero_trial.master.http.response import Dict, Response, StreamingResponse, lines, maybe_when, ok, when
from zero_trial.master.http.routes.checkpoints import checkpoint_workload_json
from zero_trial.master.records import Invalid, MetricReport, Trial, Workload

ROOT = "/api/v1/trials"
_PER_LINE = 1000  # metric reports that are sent in one line of a stream


def get(request: Request) -> Response:
    """GET /trials/{trialId}."""
    return ok({"trial": trial_json(request.master.trials.get(request.number("trialId")))})


def kill(request: Request) -> Response:
    """POST /trials/{trialId}/kill."""
    request.master.trials.kill(request.number("trialId"))
    return Response()


def workloads(request: Request) -> Response:
    """GET /trials/{trialId}/workloads."""
    batches = request.query_flag("includeBatchMetrics")
    found = request.master.trials.workloads(request.number("trialId"), include_batch_metrics=batches)
    kept = request.first("filter")
    if kept == "FILTER_OPTION_CHECKPOINT":
        found = [each for each in found if each.checkpoint is not None]
    elif kept == "FILTER_OPTION_VALIDATION":
        found = [each for each in found if each.validation is not None]
    elif kept == "FILTER_OPTION_CHECKPOINT_OR_VALIDATION":
        found = [each for each in found if each.training is None]
    if request.first("orderBy") == "ORDER_BY_DESC":
        found = found[::-1]
    page, pagination = request.page(found)
    return ok({"workloads": [workload_json(each) for each in page], "pagination": pagination})


def metrics(group: str | None) -> Any:
    """GET /trials/metrics/...: every report of the trials asked for, as a stream."""

    def action(request: Request) -> StreamingResponse:
        wanted = group or request.first("group") or None
        numbers = [whole(text, "trialIds") for text in request.query_all("trialIds")]
        for number in numbers:
            request.own(trial_id=number)
            request.master.trials.get(number)
        return lines(_reports(request, numbers, wanted), follow=False)

    return action


def _reports(request: Request, numbers: list[int], group: str | None) -> Iterator[Mapping[str, Any]]:
    for number in numbers:
        reports = iter(request.master.trials.metrics(number, group))
        while some := list(islice(reports, _PER_LINE)):
            yield {"metrics": [report_json(report) for report in some]}


def report_metrics(request: Request) -> Response:
    """POST /trials/{trialId}/metrics: the busiest route of all."""
    body = request.body()
    report, group = body.get("metrics"), body.get("group")
    if not isinstance(report, dict) or not isinstance(group, str) or not group:
        raise BadRequest(400, "a report has a group and metrics")
    values = report.get("metrics")
    averages = values.get("avgMetrics") if isinstance(values, dict) else None
    number = request.number("trialId")
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
        reported=moment(reported, "reportTime") if isinstance(reported, str) and reported else None,
    )
    return Response()


def report_progress(request: Request) -> Response:
    """POST /trials/{trialId}/progress."""
    body = request.body()
    raw = body.get("is_raw", body.get("isRaw", False))
    request.master.trials.report_progress(
        request.number("trialId"), real(body.get("progress"), "progress"), is_raw=bool(raw)
    )
    return Response()


def runner_metadata(request: Request) -> Response:
    """POST /trials/{trialId}/runner/metadata."""
    state = request.body().get("state")
    request.master.trials.set_runner_state(request.number("trialId"), state[:1000] if isinstance(state, str) else "")
    return Response()


def early_exit(request: Request) -> Response:
    """POST /trials/{trialId}/early_exit."""
    reason = request.body().get("reason")
    if not isinstance(reason, str):
        raise Invalid("reason must be one of Determined's EXITED_REASON_ names")
    request.master.trials.early_exit(request.number("trialId"), reason)
    return Response()


def start_run(request: Request) -> Response:
    """POST /runs/start: a rank begins to report. Its ``runId`` is the trial's id."""
    number = whole(request.body().get("runId"), "runId")
    request.own(trial_id=number)
    request.master.trials.start_run(number)
    return ok({"storageId": None})


def get_metadata(request: Request) -> Response:
    """GET /runs/{trialId}/metadata."""
    return ok({"metadata": dict(request.master.trials.metadata(request.number("trialId")))})


def set_metadata(request: Request) -> Response:
    """POST /runs/{trialId}/metadata."""
    metadata = request.body().get("metadata")
    if not isinstance(metadata, dict):
        raise Invalid("metadata must be an object")
    request.master.trials.set_metadata(request.number("trialId"), metadata)
    return ok({"metadata": metadata})


# -- what the answers contain, in the shapes of Determined's bindings

_OWN_GROUPS = {"training": "avg_metrics", "validation": "validation_metrics"}  # names in a trial's summary


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
        "taskIds": [record.task_id],
        "metadata": None,
    }


def metrics_json(report: MetricReport) -> Dict:
    """Render a v1MetricsWorkload."""
    return {
        "endTime": when(report.reported),
        "metrics": {"avgMetrics": dict(report.metrics), "batchMetrics": report.batch_metrics or []},
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
        "metrics": {"avg_metrics": dict(report.metrics), "batch_metrics": report.batch_metrics or []},
        "endTime": when(report.reported),
        "id": report.id,
        "archived": report.archived,
    }


def workload_json(record: Workload) -> Dict:
    """Render a v1WorkloadContainer."""
    if record.checkpoint is not None:
        return {"checkpoint": checkpoint_workload_json(record.checkpoint)}
    if record.validation is not None:
        return {"validation": metrics_json(record.validation)}
    return {"training": _maybe_metrics(record.training)}


_ONE = f"{ROOT}/{{trialId:int}}"

ROUTES = (
    Route("GET", _ONE, get, AuthLevel.BOTH),
    Route("POST", f"{_ONE}/kill", kill),
    Route("GET", f"{_ONE}/workloads", workloads, AuthLevel.BOTH),
    Route("GET", f"{ROOT}/metrics/trial_metrics", metrics(None), AuthLevel.BOTH),
    Route("GET", f"{ROOT}/metrics/training_metrics", metrics("training"), AuthLevel.BOTH),
    Route("GET", f"{ROOT}/metrics/validation_metrics", metrics("validation"), AuthLevel.BOTH),
    Route("POST", f"{_ONE}/metrics", report_metrics, AuthLevel.TASK),
    Route("POST", f"{_ONE}/progress", report_progress, AuthLevel.TASK),
    Route("POST", f"{_ONE}/runner/metadata", runner_metadata, AuthLevel.TASK),
    Route("POST", f"{_ONE}/early_exit", early_exit, AuthLevel.TASK),
    Route("POST", "/api/v1/runs/start", start_run, AuthLevel.TASK),
    Route("GET", "/api/v1/runs/{trialId:int}/metadata", get_metadata, AuthLevel.BOTH),
    Route("POST", "/api/v1/runs/{trialId:int}/metadata", set_metadata, AuthLevel.BOTH),
)
