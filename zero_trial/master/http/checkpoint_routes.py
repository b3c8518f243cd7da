"""Routes of checkpoints, the model registry and templates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_trial.master.agent.environment import check_length
from zero_trial.master.core.registry import FIRST, find_model, find_template, find_version
from zero_trial.master.http.messages import (
    AuthLevel,
    Dict,
    Request,
    Route,
    StreamingResponse,
    fields,
    pack,
    text_in,
    texts,
    when,
    whole,
)
from zero_trial.master.records import (
    Checkpoint,
    CheckpointState,
    Invalid,
    ModelVersion,
    PermissionDenied,
    RegisteredModel,
    Template,
    existing,
    parse_time,
)
from zero_trial.master.store import checkpoint_rows, user_rows
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


def _of_trial(request: Request) -> Dict:
    trial = request.master.trials.get(request.number, derived=False)
    return _listed(request, request.master.state.read(checkpoint_rows.of_trial, trial.id), trial.experiment_id)


def _listed(request: Request, found: Sequence[Checkpoint], experiment_id: int) -> Dict:
    kept = [each for each in found if request.passes("states", f"STATE_{each.state.value}")]
    return request.listed("checkpoints", _sorted(request, kept, experiment_id), checkpoint_json)


def _sorted(request: Request, found: list[Checkpoint], experiment_id: int) -> list[Checkpoint]:
    """Sort by a metric or by an attribute (default: trial id). Checkpoints without the metric come
    last; equal checkpoints are ordered by time."""
    metric, attribute = request.first("sortByMetric"), request.first("sortByAttr")
    if attribute in ("", "SORT_BY_UNSPECIFIED"):
        attribute = "SORT_BY_TRIAL_ID"
    if attribute not in _KEYS:
        raise Invalid("sortByAttr is not one of Determined's SORT_BY_ names", got=attribute[:60])
    key: Callable[[Checkpoint], Any] = (
        _KEYS[attribute] if not metric else lambda each: number_of(each.validation_metrics, metric)
    )
    order = request.first("orderBy")
    descending = order == "ORDER_BY_DESC"
    if not metric and attribute == "SORT_BY_SEARCHER_METRIC" and order != "ORDER_BY_ASC":  # better first
        config = request.master.experiments.get(experiment_id).config
        descending = descending or not smaller_is_better(config)
    known = [each for each in found if key(each) is not None]
    without = [each for each in found if key(each) is None]
    known.sort(key=lambda each: (key(each), each.reported), reverse=descending)
    return known + sorted(without, key=lambda each: each.reported)


def _download(request: Request) -> StreamingResponse:
    """Stream the files of a checkpoint as .tar.gz."""
    found = _readable(request, request.args["uuid"])
    return StreamingResponse(pack(request.master.checkpoints.directory(found.uuid)), content_type="application/gzip")


def _readable(request: Request, uuid: str) -> Checkpoint:
    """Return a checkpoint if the sender may read it: of its experiment, or its starting point."""
    found = request.master.checkpoints.get(uuid)
    allocation = request.principal.allocation
    if allocation is not None and found.experiment_id != allocation.experiment_id:
        trial = request.master.trials.get(allocation.trial_id, derived=False)
        if uuid not in (trial.latest_checkpoint, trial.warm_start_checkpoint):
            raise PermissionDenied(
                f"the token of allocation {allocation.id} does not permit access to checkpoint {uuid[:40]!r}"
            )
    return found


def _report(request: Request) -> None:
    """Store the record of a checkpoint that a trial has saved."""
    body = request.body()
    sender = request.principal.allocation
    # core_v2 sends no allocation id
    name = body.get("allocationId") or ("" if sender is None else sender.id)
    request.own(allocation_id=name, task_id=body.get("taskId"))
    metadata, resources, uuid = body.get("metadata"), body.get("resources"), body.get("uuid")
    if not isinstance(name, str) or not isinstance(body.get("taskId"), str):
        raise Invalid("a checkpoint needs a taskId, and an allocationId if it has one")
    if not isinstance(uuid, str) or not isinstance(metadata, dict) or not isinstance(resources, dict):
        raise Invalid("a checkpoint needs a uuid, metadata and resources")
    state = str(body.get("state", "STATE_COMPLETED")).removeprefix("STATE_")
    if state not in CheckpointState.__members__:
        raise Invalid("state is not one of Determined's checkpoint states", got=state[:60])
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


def _patch(request: Request) -> None:
    """Record that the harness has deleted files of checkpoints."""
    changes = request.body().get("checkpoints")
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        raise Invalid("checkpoints must be a list of changes")
    for change in changes:
        uuid, wrapped = change.get("uuid"), change.get("resources")
        if not isinstance(uuid, str):
            raise Invalid("a change of a checkpoint needs a uuid")
        request.own(experiment_id=request.master.checkpoints.get(uuid).experiment_id)
        if isinstance(wrapped, dict):
            files = _sizes(wrapped.get("resources") or {})
            request.master.checkpoints.record_files(uuid, files, unless_registered="patched")


def _set_metadata(request: Request) -> Dict:
    """Replace the metadata of a checkpoint."""
    change = request.body().get("checkpoint")
    metadata = change.get("metadata") if isinstance(change, dict) else None
    if not isinstance(metadata, dict):
        raise Invalid("checkpoint.metadata must be an object")
    uuid = request.args["uuid"]
    request.own(experiment_id=request.master.checkpoints.get(uuid).experiment_id)
    request.master.checkpoints.set_metadata(uuid, metadata)
    return {"checkpoint": checkpoint_json(request.master.checkpoints.get(uuid))}


def _remove_files(request: Request) -> None:
    body = request.body()
    globs = texts(body.get("checkpointGlobs") or [], "checkpointGlobs")
    request.master.checkpoints.remove_files(texts(body.get("checkpointUuids"), "checkpointUuids"), globs)


def _sizes(resources: Any) -> dict[str, int]:
    """Parse a map of files to sizes in bytes, which protobuf sends as text. Raises Invalid."""
    if not isinstance(resources, dict):
        raise Invalid("resources must map files to their sizes in bytes")
    try:
        sizes = {str(name): int(size) for name, size in resources.items()}
    except (TypeError, ValueError, OverflowError):
        raise Invalid("resources must map files to their sizes in bytes") from None
    if any(size < 0 for size in sizes.values()):
        raise Invalid("a file's size must not be negative", where="resources")
    return sizes


# -- responses, in the format of Determined's bindings


def checkpoint_json(record: Checkpoint) -> Dict:
    """Render a v1Checkpoint."""
    return {
        **fields(record, "uuid", "metadata", "storage_id"),
        "state": f"STATE_{record.state.value}",
        "taskId": record.task_id or None,
        "allocationId": record.allocation_id or None,
        "reportTime": when(record.reported),
        "resources": _size_texts(record.resources),
        "training": {
            **fields(record, "trial_id", "experiment_id", "experiment_config", "hparams", "searcher_metric"),
            "trainingMetrics": None,
            "validationMetrics": {"avgMetrics": record.validation_metrics, "batchMetrics": []},
        },
    }


def checkpoint_workload_json(record: Checkpoint) -> Dict:
    """Render a v1CheckpointWorkload."""
    return {
        **fields(record, "uuid", "metadata"),
        "state": f"STATE_{record.state.value}",
        "endTime": when(record.reported),
        "resources": _size_texts(record.resources),
        "totalBatches": record.steps_completed,
    }


def _size_texts(resources: Mapping[str, int]) -> dict[str, str]:
    """Return file sizes as text, as protobuf sends 64-bit numbers."""
    return {name: str(size) for name, size in resources.items()}


_MODELS = "/api/v1/models"
_TEMPLATES = "/api/v1/templates"

_MODEL_KEYS: dict[str, Callable[[RegisteredModel], Any]] = {
    "SORT_BY_UNSPECIFIED": lambda each: each.id,
    "SORT_BY_NAME": lambda each: (each.name.casefold(), each.name),
    "SORT_BY_DESCRIPTION": lambda each: (each.description.casefold(), each.description),
    "SORT_BY_CREATION_TIME": lambda each: each.created,
    "SORT_BY_LAST_UPDATED_TIME": lambda each: each.updated,
    "SORT_BY_NUM_VERSIONS": lambda each: each.num_versions,
}
_VERSION_KEYS: dict[str, Callable[[ModelVersion], Any]] = {
    "SORT_BY_UNSPECIFIED": lambda each: each.version,
    "SORT_BY_VERSION": lambda each: each.version,
    "SORT_BY_CREATION_TIME": lambda each: (each.created, each.version),
}


def _models(request: Request) -> Dict:
    """List the models that pass all filters."""
    labels, places, number = set(request.query_all("labels")), _workspaces(request), request.query_number("id")
    name, description = request.first("name").lower(), request.first("description").lower()
    found = [
        model
        for model in request.master.state.read(checkpoint_rows.models)
        if number in (0, model.id)
        and request.passes_switch("archived", model.archived)
        and request.passes("users", model.username)
        and request.passes("userIds", str(model.user_id))
        and (not labels or labels.intersection(model.labels))
        and (places is None or model.workspace_id in places)
        and name in model.name.lower()
        and description in model.description.lower()
    ]
    names = {each.id: each.name for each in request.master.state.read(user_rows.workspaces)}
    key = _key(request, {**_MODEL_KEYS, "SORT_BY_WORKSPACE": lambda model: names.get(model.workspace_id, "")})
    found.sort(key=lambda model: (key(model), model.id), reverse=request.descending)
    return request.listed("models", found, model_json)


def _workspaces(request: Request) -> set[int] | None:
    """Return the workspaces to which a list is limited; None for all."""
    if numbers := request.query_all("workspaceIds"):
        return {whole(number, "workspaceIds") for number in numbers}
    names = request.query_all("workspaceNames")
    return (
        {each.id for each in request.master.state.read(user_rows.workspaces) if each.name in names} if names else None
    )


def _key(request: Request, keys: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    asked = request.first("sortBy") or "SORT_BY_UNSPECIFIED"
    if asked not in keys:
        raise Invalid("sortBy is not one of Determined's names", got=asked[:60], expected=", ".join(keys))
    return keys[asked]


def _labels(request: Request) -> Dict:
    """List the labels of all models, the most frequent first."""
    place = request.query_number("workspaceId")
    models = [model for model in request.master.state.read(checkpoint_rows.models) if place in (0, model.workspace_id)]
    counts = Counter(label for model in models for label in model.labels)
    return {"labels": sorted(counts, key=lambda label: (-counts[label], label))}


def _model(request: Request) -> RegisteredModel:
    return request.master.state.read(find_model, request.args["modelName"])


def _create_model(request: Request) -> Dict:
    body = request.body()
    words = _words(body)
    if "name" not in words:
        raise Invalid("a model needs a name")
    place = _workspace(request, body)
    made = request.master.registry.create(words, request.user, FIRST if place is None else place)
    return {"model": model_json(made)}


def _change_model(request: Request) -> Dict:
    body = request.body()
    changed = request.master.registry.change(
        request.args["modelName"], request.user, _words(body), workspace_id=_workspace(request, body)
    )
    return {"model": model_json(changed)}


def _archive_model(on: bool) -> Callable[[Request], None]:
    return lambda request: request.master.registry.archive(request.args["modelName"], request.user, on)


def _versions(request: Request) -> Dict:
    model = _model(request)
    found = request.master.state.read(checkpoint_rows.versions, model)
    found.sort(key=_key(request, _VERSION_KEYS), reverse=request.descending)
    page, pagination = request.page(found)
    versions = [version_json(version) for version in page]
    return {"model": model_json(model), "modelVersions": versions, "pagination": pagination}


def _version(request: Request) -> Dict:
    found = request.master.state.read(find_version, request.args["modelName"], request.number)
    return {"modelVersion": version_json(found)}


def _register(request: Request) -> Dict:
    body = request.body()
    uuid = body.get("checkpointUuid")
    if not isinstance(uuid, str):
        raise Invalid("a model version needs a checkpointUuid")
    made = request.master.registry.register(request.args["modelName"], uuid, _words(body), request.user)
    return {"modelVersion": version_json(made)}


def _change_version(request: Request) -> Dict:
    name, words = request.args["modelName"], _words(request.body())
    changed = request.master.registry.change_version(name, request.number, request.user, words)
    return {"modelVersion": version_json(changed)}


def _words(body: Dict) -> dict[str, Any]:
    """Return the user-written fields of a model or a version. Raises Invalid."""
    found: dict[str, Any] = {name: text_in(body, name) for name in ("name", "description", "comment", "notes")}
    found["metadata"] = body.get("metadata")
    if not isinstance(found["metadata"], dict | None):
        raise Invalid("metadata must be a map")
    found["labels"] = None if body.get("labels") is None else texts(body["labels"], "labels")
    return {name: value for name, value in found.items() if value is not None}


def _workspace(request: Request, body: Dict) -> int | None:
    """Return the workspace that a body names by id or name; None if it names none."""
    if body.get("workspaceId") is not None:
        return whole(body["workspaceId"], "workspaceId")
    name = body.get("workspaceName")
    if name is None:
        return None
    found = [each.id for each in request.master.state.read(user_rows.workspaces) if each.name == name]
    return existing(found[0] if found else None, f"workspace {str(name)[:60]!r}")


# -- templates


def _templates(request: Request) -> Dict:
    places, name = _workspaces(request), request.first("name").lower()
    found = [
        template
        for template in request.master.state.read(user_rows.templates)
        if name in template.name.lower() and (places is None or template.workspace_id in places)
    ]
    return request.listed("templates", found[::-1] if request.descending else found, template_json)


def _create_template(request: Request) -> Dict:
    """Create a template."""
    body = request.body()
    columns: Dict = {}
    if body.get("config") is not None:
        columns["config"] = _config(body["config"])
    if body.get("workspaceId"):
        columns["workspace_id"] = whole(body["workspaceId"], "workspaceId")
    made = request.master.registry.create_template(request.args["templateName"], request.user, FIRST, **columns)
    return {"template": template_json(made)}


def _change_template(request: Request) -> Dict:
    """Replace the configuration of a template with the body."""
    name, config = request.args["templateName"], _config(request.body())
    return {"template": template_json(request.master.registry.change_template(name, request.user, config))}


def _config(sent: Any) -> Dict:
    if not isinstance(sent, dict):
        raise Invalid("the configuration of a template must be a map", where="config")
    check_length(json.dumps(sent))
    return sent


# -- responses, in the format of Determined's bindings


def model_json(record: RegisteredModel) -> Dict:
    """Render a v1Model."""
    same = ("id", "name", "description", "notes", "metadata", "labels", "username", "user_id", "workspace_id")
    return {**fields(record, *same, "archived", "num_versions"), **_times(record)}


def _times(record: RegisteredModel | ModelVersion) -> Dict:
    return {"creationTime": when(record.created), "lastUpdatedTime": when(record.updated)}


def version_json(record: ModelVersion) -> Dict:
    """Render a v1ModelVersion."""
    same = ("id", "version", "name", "comment", "notes", "metadata", "labels", "username", "user_id")
    whole = {"model": model_json(record.model), "checkpoint": checkpoint_json(record.checkpoint)}
    return {**fields(record, *same), **whole, **_times(record)}


def template_json(record: Template) -> Dict:
    """Render a v1Template."""
    return fields(record, "name", "config", "workspace_id")


_ONE_MODEL = f"{_MODELS}/{{modelName}}"
_ONE_VERSION = f"{_ONE_MODEL}/versions/{{modelVersionNum:int}}"
_ONE_TEMPLATE = f"{_TEMPLATES}/{{templateName}}"


ROUTES = (
    Route(
        "GET",
        "/api/v1/experiments/{experimentId:int}/checkpoints",
        lambda call: _listed(call, call.master.experiments.checkpoints(call.number), call.number),
        AuthLevel.BOTH,
    ),
    Route("GET", "/api/v1/trials/{trialId:int}/checkpoints", _of_trial, AuthLevel.BOTH),
    Route(
        "GET",
        f"{_ROOT}/{{uuid}}",
        lambda call: {"checkpoint": checkpoint_json(_readable(call, call.args["uuid"]))},
        AuthLevel.BOTH,
    ),
    Route("GET", "/checkpoints/{uuid}", _download, AuthLevel.BOTH),
    Route("POST", _ROOT, _report, AuthLevel.BOTH),
    Route("PATCH", _ROOT, _patch, AuthLevel.BOTH),
    Route("POST", f"{_ROOT}/{{uuid}}/metadata", _set_metadata, AuthLevel.BOTH),
    Route(
        "DELETE",
        _ROOT,
        lambda call: call.master.checkpoints.delete(texts(call.body().get("checkpointUuids"), "checkpointUuids")),
    ),
    Route("POST", f"{_ROOT}/rm", _remove_files),
    Route("GET", _MODELS, _models),
    Route("POST", _MODELS, _create_model),
    Route("GET", "/api/v1/model/labels", _labels),
    Route("GET", _ONE_MODEL, lambda call: {"model": model_json(_model(call))}),
    Route("PATCH", _ONE_MODEL, _change_model),
    Route("DELETE", _ONE_MODEL, lambda call: call.master.registry.delete(call.args["modelName"], call.user)),
    Route("POST", f"{_ONE_MODEL}/archive", _archive_model(True)),
    Route("POST", f"{_ONE_MODEL}/unarchive", _archive_model(False)),
    Route("GET", f"{_ONE_MODEL}/versions", _versions),
    Route("POST", f"{_ONE_MODEL}/versions", _register),
    Route("GET", _ONE_VERSION, _version),
    Route("PATCH", _ONE_VERSION, _change_version),
    Route(
        "DELETE",
        _ONE_VERSION,
        lambda call: call.master.registry.delete_version(call.args["modelName"], call.number, call.user),
    ),
    Route("GET", _TEMPLATES, _templates),
    Route(
        "GET",
        _ONE_TEMPLATE,
        lambda call: {"template": template_json(call.master.state.read(find_template, call.args["templateName"]))},
    ),
    Route("POST", _ONE_TEMPLATE, _create_template),
    Route("PATCH", _ONE_TEMPLATE, _change_template),
    Route(
        "DELETE",
        _ONE_TEMPLATE,
        lambda call: call.master.registry.delete_template(call.args["templateName"], call.user),
    ),
)
