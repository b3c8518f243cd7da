"""Routes of trials: what is known of them, and what the harness reports while one runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from zero_trial.master.errors import Invalid
from zero_trial.master.http import render
from zero_trial.master.http.request import BadRequest, Request, moment, real, whole
from zero_trial.master.http.response import Response, StreamingResponse, lines, ok
from zero_trial.master.http.router import AuthLevel, Route

ROOT = "/api/v1/trials"
_PER_LINE = 1000  # metric reports that are sent in one line of a stream


def get(call: Request) -> Response:
    """GET /trials/{trialId}."""
    return ok({"trial": render.trial(call.cluster.trials.get(call.number("trialId")))})


def kill(call: Request) -> Response:
    """POST /trials/{trialId}/kill."""
    call.cluster.trials.kill(call.number("trialId"))
    return Response()


def workloads(call: Request) -> Response:
    """GET /trials/{trialId}/workloads."""
    batches = call.query_flag("includeBatchMetrics")
    found = call.cluster.trials.workloads(call.number("trialId"), include_batch_metrics=batches)
    kept = call.request.first("filter")
    if kept == "FILTER_OPTION_CHECKPOINT":
        found = [each for each in found if each.checkpoint is not None]
    elif kept == "FILTER_OPTION_VALIDATION":
        found = [each for each in found if each.validation is not None]
    elif kept == "FILTER_OPTION_CHECKPOINT_OR_VALIDATION":
        found = [each for each in found if each.training is None]
    if call.request.first("orderBy") == "ORDER_BY_DESC":
        found = found[::-1]
    page, pagination = call.page(found)
    return ok({"workloads": [render.workload(each) for each in page], "pagination": pagination})


def metrics(group: str | None) -> Any:
    """GET /trials/metrics/...: every report of the trials asked for, as a stream."""

    def action(call: Request) -> StreamingResponse:
        wanted = group or call.request.first("group") or None
        numbers = [whole(text, "trialIds") for text in call.query_all("trialIds")]
        for number in numbers:
            call.own(trial_id=number)
            call.cluster.trials.get(number)
        return lines(_reports(call, numbers, wanted), follow=False)

    return action


def _reports(call: Request, numbers: list[int], group: str | None) -> Iterator[Mapping[str, Any]]:
    for number in numbers:
        reports = iter(call.cluster.trials.metrics(number, group))
        while some := list(islice(reports, _PER_LINE)):
            yield {"metrics": [render.trial_metrics(report) for report in some]}


def report_metrics(call: Request) -> Response:
    """POST /trials/{trialId}/metrics: the busiest route of all."""
    body = call.body()
    report, group = body.get("metrics"), body.get("group")
    if not isinstance(report, dict) or not isinstance(group, str) or not group:
        raise BadRequest(400, "a report has a group and metrics")
    values = report.get("metrics")
    averages = values.get("avgMetrics") if isinstance(values, dict) else None
    number = call.number("trialId")
    if not isinstance(values, dict) or not isinstance(averages, dict) or report.get("trialId", number) != number:
        raise BadRequest(400, "a report has metrics.avgMetrics and the trial's own id")
    batches = values.get("batchMetrics")
    if batches is not None and not (isinstance(batches, list) and all(isinstance(batch, dict) for batch in batches)):
        raise BadRequest(400, "metrics.batchMetrics is a list of objects, one of each batch")
    steps, reported = report.get("stepsCompleted"), report.get("reportTime")
    call.cluster.trials.report_metrics(
        number,
        run_id=whole(report.get("trialRunId"), "trialRunId"),
        group=group,
        steps_completed=None if steps is None else whole(steps, "stepsCompleted"),
        metrics=averages,
        batch_metrics=batches,
        reported=moment(reported, "reportTime") if isinstance(reported, str) and reported else None,
    )
    return Response()


def report_progress(call: Request) -> Response:
    """POST /trials/{trialId}/progress."""
    body = call.body()
    raw = body.get("is_raw", body.get("isRaw", False))
    call.cluster.trials.report_progress(
        call.number("trialId"), real(body.get("progress"), "progress"), is_raw=bool(raw)
    )
    return Response()


def runner_metadata(call: Request) -> Response:
    """POST /trials/{trialId}/runner/metadata."""
    state = call.body().get("state")
    call.cluster.trials.set_runner_state(call.number("trialId"), state[:1000] if isinstance(state, str) else "")
    return Response()


def early_exit(call: Request) -> Response:
    """POST /trials/{trialId}/early_exit."""
    reason = call.body().get("reason")
    if not isinstance(reason, str):
        raise Invalid("reason must be one of Determined's EXITED_REASON_ names")
    call.cluster.trials.early_exit(call.number("trialId"), reason)
    return Response()


def start_run(call: Request) -> Response:
    """POST /runs/start: a rank begins to report. Its ``runId`` is the trial's id."""
    number = whole(call.body().get("runId"), "runId")
    call.own(trial_id=number)
    call.cluster.trials.start_run(number)
    return ok({"storageId": None})


def get_metadata(call: Request) -> Response:
    """GET /runs/{trialId}/metadata."""
    return ok({"metadata": dict(call.cluster.trials.metadata(call.number("trialId")))})


def set_metadata(call: Request) -> Response:
    """POST /runs/{trialId}/metadata."""
    metadata = call.body().get("metadata")
    if not isinstance(metadata, dict):
        raise Invalid("metadata must be an object")
    call.cluster.trials.set_metadata(call.number("trialId"), metadata)
    return ok({"metadata": metadata})


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
