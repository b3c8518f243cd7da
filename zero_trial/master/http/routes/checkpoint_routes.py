"""Routes of checkpoints: lists of them, one by its UUID, its files, and their end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_trial.master.http.messages import (
    AuthLevel,
    Dict,
    Request,
    Response,
    Route,
    StreamingResponse,
    ok,
    pack,
    texts,
    when,
    whole,
)
from zero_trial.master.records import Checkpoint, CheckpointState, Invalid, PermissionDenied, parse_time
from zero_trial.master.store.experiment_rows import smaller_is_better
from zero_trial.master.store.metric_rows import number_of

_ROOT = "/api/v1/checkpoints"

_KEYS: dict[str, Callable[[Checkpoint], Any]] = {
    "SORT_BY_UUID": lambda each: each.uuid,
    "SORT_BY_TRIAL_ID": lambda each: each.trial_id or 0,
    "SORT_BY_BATCH_NUMBER": lambda each: each.steps_completed,
    "SORT_BY_END_TIME": lambda each: each.reported,
    "SORT_BY_STATE": lambda each: list(CheckpointState).index(each.state),
    "SORT_BY_SEARCHER_METRIC": lambda each: each.searcher_metric,
}


def _of_experiment(request: Request) -> Response:
    number = request.numbers["experimentId"]
    return _listed(request, request.master.experiments.checkpoints(number), number)


def _of_trial(request: Request) -> Response:
    trial = request.master.trials.get(request.numbers["trialId"], derived=False)
    return _listed(request, request.master.trials.checkpoints(trial.id), trial.experiment_id)


def _listed(request: Request, found: Sequence[Checkpoint], experiment_id: int) -> Response:
    states = set(request.query_all("states"))
    kept = [each for each in found if not states or f"STATE_{each.state.value}" in states]
    page, pagination = request.page(_sorted(request, kept, experiment_id))
    return ok({"checkpoints": [checkpoint_json(each) for each in page], "pagination": pagination})


def _sorted(request: Request, found: list[Checkpoint], experiment_id: int) -> list[Checkpoint]:
    """Sort by a metric or by an attribute, the trial's id where none is named; what has no such
    metric comes last, and what is equal by time.
    """
    metric, attribute = request.first("sortByMetric"), request.first("sortByAttr")
    if attribute in ("", "SORT_BY_UNSPECIFIED"):
        attribute = "SORT_BY_TRIAL_ID"
    if attribute not in _KEYS:
        raise Invalid("sortByAttr is none of Determined's SORT_BY_ names", got=attribute[:60])
    key: Callable[[Checkpoint], Any] = (
        _KEYS[attribute] if not metric else lambda each: number_of(each.validation_metrics, metric)
    )
    order = request.first("orderBy")
    descending = order == "ORDER_BY_DESC"
    if not metric and attribute == "SORT_BY_SEARCHER_METRIC" and order != "ORDER_BY_ASC":  # the better first
        config = request.master.experiments.get(experiment_id).config
        descending = descending or not smaller_is_better(config)
    known = [each for each in found if key(each) is not None]
    without = [each for each in found if key(each) is None]
    known.sort(key=lambda each: (key(each), each.reported), reverse=descending)
    return known + sorted(without, key=lambda each: each.reported)


def _get(request: Request) -> Response:
    return ok({"checkpoint": checkpoint_json(_readable(request, request.args["uuid"]))})


def _download(request: Request) -> StreamingResponse:
    """Send the files of a checkpoint as .tar.gz."""
    found = _readable(request, request.args["uuid"])
    return StreamingResponse(pack(request.master.checkpoints.directory(found.uuid)), content_type="application/gzip")


def _readable(request: Request, uuid: str) -> Checkpoint:
    """Return a checkpoint that the sender may read: a trial reads those of its own experiment, and
    the one that it starts from.
    """
    found = request.master.checkpoints.get(uuid)
    allocation = request.principal.allocation
    if allocation is not None and found.experiment_id != allocation.experiment_id:
        trial = request.master.trials.get(allocation.trial_id, derived=False)
        if uuid not in (trial.latest_checkpoint, trial.warm_start_checkpoint):
            raise PermissionDenied(
                f"the token of allocation {allocation.id} does not permit access to checkpoint {uuid[:40]!r}"
            )
    return found


def _report(request: Request) -> Response:
    """Store a checkpoint that a trial has saved."""
    body = request.body()
    sender = request.principal.allocation
    # core_v2 names no allocation
    name = body.get("allocationId") or ("" if sender is None else sender.id)
    request.own(allocation_id=name, task_id=body.get("taskId"))
    metadata, resources, uuid = body.get("metadata"), body.get("resources"), body.get("uuid")
    if not isinstance(name, str) or not isinstance(body.get("taskId"), str):
        raise Invalid("a checkpoint has a taskId, and an allocationId if it has one")
    if not isinstance(uuid, str) or not isinstance(metadata, dict) or not isinstance(resources, dict):
        raise Invalid("a checkpoint has a uuid, metadata and resources")
    state = str(body.get("state", "STATE_COMPLETED")).removeprefix("STATE_")
    if state not in CheckpointState.__members__:
        raise Invalid("state is none of Determined's checkpoint states", got=state[:60])
    reported, storage = body.get("reportTime"), body.get("storageId")
    request.master.checkpoints.report(
        Checkpoint(
            uuid=uuid,
            state=CheckpointState[state],
            trial_id=None,
            experiment_id=None,
            task_id=body["taskId"],
            allocation_id=name,
            reported=parse_time(reported, "reportTime") if isinstance(reported, str) and reported else 0.0,
            metadata=metadata,
            resources=_sizes(resources),
            storage_id=None if storage is None else whole(storage, "storageId"),
        )
    )
    return Response()


def _patch(request: Request) -> Response:
    """Record that the harness has deleted files of some checkpoints."""
    changes = request.body().get("checkpoints")
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        raise Invalid("checkpoints must be a list of changes")
    for change in changes:
        uuid, wrapped = change.get("uuid"), change.get("resources")
        if not isinstance(uuid, str):
            raise Invalid("a change of a checkpoint has no uuid")
        request.own(experiment_id=request.master.checkpoints.get(uuid).experiment_id)
        if isinstance(wrapped, dict):
            request.master.checkpoints.patch_resources(uuid, _sizes(wrapped.get("resources") or {}))
    return Response()


def _set_metadata(request: Request) -> Response:
    """Replace the metadata of a checkpoint."""
    change = request.body().get("checkpoint")
    metadata = change.get("metadata") if isinstance(change, dict) else None
    if not isinstance(metadata, dict):
        raise Invalid("checkpoint.metadata must be an object")
    uuid = request.args["uuid"]
    request.own(experiment_id=request.master.checkpoints.get(uuid).experiment_id)
    request.master.checkpoints.set_metadata(uuid, metadata)
    return ok({"checkpoint": checkpoint_json(request.master.checkpoints.get(uuid))})


def _delete(request: Request) -> Response:
    request.master.checkpoints.delete(texts(request.body().get("checkpointUuids"), "checkpointUuids"))
    return Response()


def _remove_files(request: Request) -> Response:
    body = request.body()
    globs = texts(body.get("checkpointGlobs") or [], "checkpointGlobs")
    request.master.checkpoints.remove_files(texts(body.get("checkpointUuids"), "checkpointUuids"), globs)
    return Response()


def _sizes(resources: Any) -> dict[str, int]:
    """Read a map of files to their sizes in bytes, which protobuf sends as text. Raises Invalid."""
    if not isinstance(resources, dict):
        raise Invalid("resources must map files to their sizes in bytes")
    try:
        sizes = {str(name): int(size) for name, size in resources.items()}
    except (TypeError, ValueError, OverflowError):
        raise Invalid("resources must map files to their sizes in bytes") from None
    if any(size < 0 for size in sizes.values()):
        raise Invalid("a file's size must not be negative", where="resources")
    return sizes


# -- what the answers contain, in the shapes of Determined's bindings


def checkpoint_json(record: Checkpoint) -> Dict:
    """Render a v1Checkpoint."""
    return {
        "uuid": record.uuid,
        "state": f"STATE_{record.state.value}",
        "taskId": record.task_id or None,
        "allocationId": record.allocation_id or None,
        "reportTime": when(record.reported),
        "resources": _size_texts(record.resources),
        "metadata": dict(record.metadata),
        "storageId": record.storage_id,
        "training": {
            "trialId": record.trial_id,
            "experimentId": record.experiment_id,
            "experimentConfig": dict(record.experiment_config),
            "hparams": dict(record.hparams),
            "trainingMetrics": None,
            "validationMetrics": {"avgMetrics": dict(record.validation_metrics), "batchMetrics": []},
            "searcherMetric": record.searcher_metric,
        },
    }


def checkpoint_workload_json(record: Checkpoint) -> Dict:
    """Render a v1CheckpointWorkload."""
    return {
        "uuid": record.uuid,
        "state": f"STATE_{record.state.value}",
        "endTime": when(record.reported),
        "resources": _size_texts(record.resources),
        "metadata": dict(record.metadata),
        "totalBatches": record.steps_completed,
    }


def _size_texts(resources: Mapping[str, int]) -> dict[str, str]:
    """Write file sizes as text, as protobuf sends 64-bit numbers."""
    return {name: str(size) for name, size in resources.items()}


ROUTES = (
    Route("GET", "/api/v1/experiments/{experimentId:int}/checkpoints", _of_experiment, AuthLevel.BOTH),
    Route("GET", "/api/v1/trials/{trialId:int}/checkpoints", _of_trial, AuthLevel.BOTH),
    Route("GET", f"{_ROOT}/{{uuid}}", _get, AuthLevel.BOTH),
    Route("GET", "/checkpoints/{uuid}", _download, AuthLevel.BOTH),
    Route("POST", _ROOT, _report, AuthLevel.BOTH),
    Route("PATCH", _ROOT, _patch, AuthLevel.BOTH),
    Route("POST", f"{_ROOT}/{{uuid}}/metadata", _set_metadata, AuthLevel.BOTH),
    Route("DELETE", _ROOT, _delete),
    Route("POST", f"{_ROOT}/rm", _remove_files),
)
