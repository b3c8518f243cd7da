"""Routes of checkpoints: lists of them, one by its UUID, its files, and their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zero_trial.master.errors import Invalid, PermissionDenied
from zero_trial.master.http import render
from zero_trial.master.http.request import Request, moment
from zero_trial.master.http.response import Response, StreamingResponse, ok, pack
from zero_trial.master.http.router import AuthLevel, Route
from zero_trial.master.records import Checkpoint, CheckpointState
from zero_trial.master.store.metrics import number_of

ROOT = "/api/v1/checkpoints"

_KEYS: dict[str, Callable[[Checkpoint], Any]] = {
    "SORT_BY_UUID": lambda each: each.uuid,
    "SORT_BY_TRIAL_ID": lambda each: each.trial_id,
    "SORT_BY_BATCH_NUMBER": lambda each: each.steps_completed,
    "SORT_BY_END_TIME": lambda each: each.reported,
    "SORT_BY_STATE": lambda each: each.state.value,
    "SORT_BY_SEARCHER_METRIC": lambda each: each.searcher_metric,
}


def of_experiment(call: Request) -> Response:
    """GET /experiments/{experimentId}/checkpoints."""
    number = call.number("experimentId")
    found = call.cluster.experiments.checkpoints(number)
    searcher = call.cluster.experiments.get(number).config.get("searcher")
    smaller = bool(searcher.get("smaller_is_better", True)) if isinstance(searcher, dict) else True
    return _listed(call, found, smaller_is_better=smaller)


def of_trial(call: Request) -> Response:
    """GET /trials/{trialId}/checkpoints."""
    trial = call.cluster.trials.get(call.number("trialId"))
    searcher = call.cluster.experiments.get(trial.experiment_id).config.get("searcher")
    smaller = bool(searcher.get("smaller_is_better", True)) if isinstance(searcher, dict) else True
    return _listed(call, call.cluster.trials.checkpoints(trial.id), smaller_is_better=smaller)


def _listed(call: Request, found: Sequence[Checkpoint], *, smaller_is_better: bool) -> Response:
    states = set(call.query_all("states"))
    kept = [each for each in found if not states or f"STATE_{each.state.value}" in states]
    page, pagination = call.page(_sorted(call, kept, smaller_is_better))
    return ok({"checkpoints": [render.checkpoint(each) for each in page], "pagination": pagination})


def _sorted(call: Request, found: list[Checkpoint], smaller_is_better: bool) -> list[Checkpoint]:
    """By a metric, best first, those without it left out; or by an attribute, ascending unless asked otherwise."""
    metric, attribute = call.request.first("sortByMetric"), call.request.first("sortByAttr")
    order = call.request.first("orderBy")
    if metric:
        key: Callable[[Checkpoint], Any] = lambda each: number_of(each.validation_metrics, metric)  # noqa: E731
    elif attribute in _KEYS:
        key = _KEYS[attribute]
    elif attribute in ("", "SORT_BY_UNSPECIFIED"):
        key = _KEYS["SORT_BY_SEARCHER_METRIC"] if _ranked(found) else _KEYS["SORT_BY_END_TIME"]
        return _with_key(found, key, reverse=_ranked(found) and not smaller_is_better)
    else:
        raise Invalid("sortByAttr is none of Determined's SORT_BY_ names", got=attribute[:60])
    by_searcher = not metric and attribute == "SORT_BY_SEARCHER_METRIC"
    descending = order == "ORDER_BY_DESC" or (by_searcher and order != "ORDER_BY_ASC" and not smaller_is_better)
    return _with_key(found, key, reverse=descending)


def _ranked(found: Sequence[Checkpoint]) -> bool:
    return any(isinstance(each.searcher_metric, int | float) for each in found)


def _with_key(found: Sequence[Checkpoint], key: Callable[[Checkpoint], Any], *, reverse: bool) -> list[Checkpoint]:
    return sorted((each for each in found if key(each) is not None), key=key, reverse=reverse)


def get(call: Request) -> Response:
    """GET /checkpoints/{uuid}."""
    return ok({"checkpoint": render.checkpoint(_readable(call, call.text("uuid")))})


def download(call: Request) -> StreamingResponse:
    """GET /checkpoints/{uuid} outside of /api/v1: its files as .tar.gz."""
    found = _readable(call, call.text("uuid"))
    return StreamingResponse(pack(call.cluster.checkpoints.directory(found.uuid)), content_type="application/gzip")


def _readable(call: Request, uuid: str) -> Checkpoint:
    """A checkpoint that the sender may read: a trial reads those of its own experiment, and the one that it starts from."""
    found = call.cluster.checkpoints.get(uuid)
    allocation = call.principal.allocation
    if allocation is not None and found.experiment_id != allocation.experiment_id:
        trial = call.cluster.trials.get(allocation.trial_id)
        if uuid not in (trial.latest_checkpoint, trial.warm_start_checkpoint):
            raise PermissionDenied(f"the token of allocation {allocation.id} is not good for checkpoint {uuid[:40]!r}")
    return found


def report(call: Request) -> Response:
    """POST /checkpoints: a trial has saved one."""
    body = call.body()
    call.own(allocation_id=body.get("allocationId"), task_id=body.get("taskId"))
    metadata, resources, uuid = body.get("metadata"), body.get("resources"), body.get("uuid")
    if not isinstance(uuid, str) or not isinstance(metadata, dict) or not isinstance(resources, dict):
        raise Invalid("a checkpoint has a uuid, metadata and resources")
    state = str(body.get("state", "STATE_COMPLETED")).removeprefix("STATE_")
    if state not in CheckpointState.__members__:
        raise Invalid("state is none of Determined's checkpoint states", got=state[:60])
    reported = body.get("reportTime")
    call.cluster.checkpoints.report(
        Checkpoint(
            uuid=uuid,
            state=CheckpointState[state],
            trial_id=None,
            experiment_id=None,
            task_id=str(body["taskId"]),
            allocation_id=str(body["allocationId"]),
            reported=moment(reported, "reportTime") if isinstance(reported, str) and reported else 0.0,
            metadata=metadata,
            resources=_sizes(resources),
        )
    )
    return Response()


def patch(call: Request) -> Response:
    """PATCH /checkpoints: the harness has deleted files of some."""
    changes = call.body().get("checkpoints")
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        raise Invalid("checkpoints must be a list of changes")
    for change in changes:
        uuid, wrapped = change.get("uuid"), change.get("resources")
        if not isinstance(uuid, str):
            raise Invalid("a change of a checkpoint has no uuid")
        call.own(experiment_id=call.cluster.checkpoints.get(uuid).experiment_id)
        if isinstance(wrapped, dict):
            call.cluster.checkpoints.patch_resources(uuid, _sizes(wrapped.get("resources") or {}))
    return Response()


def delete(call: Request) -> Response:
    """DELETE /checkpoints."""
    call.cluster.checkpoints.delete(_texts(call.body().get("checkpointUuids"), "checkpointUuids"))
    return Response()


def remove_files(call: Request) -> Response:
    """POST /checkpoints/rm."""
    body = call.body()
    globs = _texts(body.get("checkpointGlobs") or [], "checkpointGlobs")
    call.cluster.checkpoints.remove_files(_texts(body.get("checkpointUuids"), "checkpointUuids"), globs)
    return Response()


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Invalid(f"{name} must be a list of texts")
    return list(dict.fromkeys(value))


def _sizes(resources: Any) -> dict[str, int]:
    if not isinstance(resources, dict):
        raise Invalid("resources must map files to their sizes")
    try:
        return {str(name): int(size) for name, size in resources.items()}
    except (TypeError, ValueError, OverflowError):
        raise Invalid("resources must map files to their sizes in bytes") from None


ROUTES = (
    Route("GET", "/api/v1/experiments/{experimentId:int}/checkpoints", of_experiment, AuthLevel.BOTH),
    Route("GET", "/api/v1/trials/{trialId:int}/checkpoints", of_trial, AuthLevel.BOTH),
    Route("GET", f"{ROOT}/{{uuid}}", get, AuthLevel.BOTH),
    Route("GET", "/checkpoints/{uuid}", download, AuthLevel.BOTH),
    Route("POST", ROOT, report, AuthLevel.TASK),
    Route("PATCH", ROOT, patch, AuthLevel.BOTH),
    Route("DELETE", ROOT, delete),
    Route("POST", f"{ROOT}/rm", remove_files),
)
