"""Routes of the model registry and of templates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from zero_trial.master.agent.environment import check_length
from zero_trial.master.core.registry import FIRST, find_model, find_template, find_version
from zero_trial.master.http.messages import Dict, Request, Response, Route, ok, texts, when, whole
from zero_trial.master.http.routes.checkpoint_routes import checkpoint_json
from zero_trial.master.records import Invalid, ModelVersion, RegisteredModel, Template, existing
from zero_trial.master.store import checkpoint_rows, user_rows

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


def _models(request: Request) -> Response:
    """List the models that all filters let pass."""
    wanted = {name: set(request.query_all(name)) for name in ("users", "userIds", "labels")}
    places = _workspaces(request)
    number, archived = request.query_number("id"), request.first("archived").lower()
    name, description = request.first("name").lower(), request.first("description").lower()
    found = [
        model
        for model in request.master.state.read(checkpoint_rows.models)
        if number in (0, model.id)
        and (not archived or model.archived == (archived == "true"))
        and (not wanted["users"] or model.username in wanted["users"])
        and (not wanted["userIds"] or str(model.user_id) in wanted["userIds"])
        and (not wanted["labels"] or wanted["labels"].intersection(model.labels))
        and (places is None or model.workspace_id in places)
        and name in model.name.lower()
        and description in model.description.lower()
    ]
    names = {each.id: each.name for each in request.master.state.read(user_rows.workspaces)}
    key = _key(request, {**_MODEL_KEYS, "SORT_BY_WORKSPACE": lambda model: names.get(model.workspace_id, "")})
    found.sort(key=lambda model: (key(model), model.id), reverse=request.first("orderBy") == "ORDER_BY_DESC")
    page, pagination = request.page(found)
    return ok({"models": [model_json(model) for model in page], "pagination": pagination})


def _workspaces(request: Request) -> set[int] | None:
    """Return the workspaces that a list is limited to; None for all."""
    if numbers := request.query_all("workspaceIds"):
        return {whole(number, "workspaceIds") for number in numbers}
    names = request.query_all("workspaceNames")
    return (
        {each.id for each in request.master.state.read(user_rows.workspaces) if each.name in names} if names else None
    )


def _key(request: Request, keys: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    asked = request.first("sortBy") or "SORT_BY_UNSPECIFIED"
    if asked not in keys:
        raise Invalid("sortBy is none of Determined's names", got=asked[:60], expected=", ".join(keys))
    return keys[asked]


def _labels(request: Request) -> Response:
    """List the labels of all models, those of most models first."""
    place = request.query_number("workspaceId")
    models = [model for model in request.master.state.read(checkpoint_rows.models) if place in (0, model.workspace_id)]
    counts = Counter(label for model in models for label in model.labels)
    return ok({"labels": sorted(counts, key=lambda label: (-counts[label], label))})


def _model(request: Request) -> Response:
    return ok({"model": model_json(request.master.state.read(find_model, request.args["modelName"]))})


def _create(request: Request) -> Response:
    body = request.body()
    words = _words(body)
    if "name" not in words:
        raise Invalid("a model has a name")
    place = _workspace(request, body)
    made = request.master.registry.create(words, request.user, FIRST if place is None else place)
    return ok({"model": model_json(made)})


def _change(request: Request) -> Response:
    body = request.body()
    changed = request.master.registry.change(
        request.args["modelName"], request.user, _words(body), workspace_id=_workspace(request, body)
    )
    return ok({"model": model_json(changed)})


def _archive(request: Request) -> Response:
    request.master.registry.archive(request.args["modelName"], request.user, request.head.path.endswith("/archive"))
    return Response()


def _delete(request: Request) -> Response:
    request.master.registry.delete(request.args["modelName"], request.user)
    return Response()


def _versions(request: Request) -> Response:
    model = request.master.state.read(find_model, request.args["modelName"])
    found = request.master.state.read(checkpoint_rows.versions, model)
    found.sort(key=_key(request, _VERSION_KEYS), reverse=request.first("orderBy") == "ORDER_BY_DESC")
    page, pagination = request.page(found)
    versions = [version_json(version) for version in page]
    return ok({"model": model_json(model), "modelVersions": versions, "pagination": pagination})


def _version(request: Request) -> Response:
    found = request.master.state.read(find_version, request.args["modelName"], request.numbers["modelVersionNum"])
    return ok({"modelVersion": version_json(found)})


def _register(request: Request) -> Response:
    body = request.body()
    uuid = body.get("checkpointUuid")
    if not isinstance(uuid, str):
        raise Invalid("a version of a model has a checkpointUuid")
    made = request.master.registry.register(request.args["modelName"], uuid, _words(body), request.user)
    return ok({"modelVersion": version_json(made)})


def _change_version(request: Request) -> Response:
    number = request.numbers["modelVersionNum"]
    name, words = request.args["modelName"], _words(request.body())
    changed = request.master.registry.change_version(name, number, request.user, words)
    return ok({"modelVersion": version_json(changed)})


def _delete_version(request: Request) -> Response:
    name, number = request.args["modelName"], request.numbers["modelVersionNum"]
    request.master.registry.delete_version(name, number, request.user)
    return Response()


def _words(body: Dict) -> dict[str, Any]:
    """Return what users write on a model or a version. Raises Invalid."""
    names = ("name", "description", "comment", "notes", "metadata", "labels")
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in found.items():
        if name == "metadata" and not isinstance(value, dict):
            raise Invalid("metadata must be a map")
        if name not in ("metadata", "labels") and not isinstance(value, str):
            raise Invalid(f"{name} must be a text")
    return {**found, "labels": texts(found["labels"], "labels")} if "labels" in found else found


def _workspace(request: Request, body: Dict) -> int | None:
    """Return the workspace that a body names by id or by name; None if it names none."""
    if body.get("workspaceId") is not None:
        return whole(body["workspaceId"], "workspaceId")
    name = body.get("workspaceName")
    if name is None:
        return None
    found = [each.id for each in request.master.state.read(user_rows.workspaces) if each.name == name]
    return existing(found[0] if found else None, f"workspace {str(name)[:60]!r}")


# -- templates


def _templates(request: Request) -> Response:
    places, name = _workspaces(request), request.first("name").lower()
    found = [
        template
        for template in request.master.state.read(user_rows.templates)
        if name in template.name.lower() and (places is None or template.workspace_id in places)
    ]
    page, pagination = request.page(found[::-1] if request.first("orderBy") == "ORDER_BY_DESC" else found)
    return ok({"templates": [template_json(template) for template in page], "pagination": pagination})


def _template(request: Request) -> Response:
    return _answer(request.master.state.read(find_template, request.args["templateName"]))


def _create_template(request: Request) -> Response:
    """Create a template."""
    body = request.body()
    columns: Dict = {}
    if body.get("config") is not None:
        columns["config"] = _config(body["config"])
    if body.get("workspaceId"):
        columns["workspace_id"] = whole(body["workspaceId"], "workspaceId")
    name = request.args["templateName"]
    return _answer(request.master.registry.create_template(name, request.user, FIRST, **columns))


def _change_template(request: Request) -> Response:
    """Replace the configuration of a template by the body."""
    name, config = request.args["templateName"], _config(request.body())
    return _answer(request.master.registry.change_template(name, request.user, config))


def _delete_template(request: Request) -> Response:
    request.master.registry.delete_template(request.args["templateName"], request.user)
    return Response()


def _config(sent: Any) -> Dict:
    if not isinstance(sent, dict):
        raise Invalid("the configuration of a template must be a map", where="config")
    check_length(json.dumps(sent))
    return sent


def _answer(template: Template) -> Response:
    return ok({"template": template_json(template)})


# -- what the answers contain, in the shapes of Determined's bindings


def model_json(record: RegisteredModel) -> Dict:
    """Render a v1Model."""
    return {
        "id": record.id,
        "name": record.name,
        "description": record.description,
        "notes": record.notes,
        "metadata": dict(record.metadata),
        "labels": list(record.labels),
        "username": record.username,
        "userId": record.user_id,
        "workspaceId": record.workspace_id,
        "archived": record.archived,
        "numVersions": record.num_versions,
        "creationTime": when(record.created),
        "lastUpdatedTime": when(record.updated),
    }


def version_json(record: ModelVersion) -> Dict:
    """Render a v1ModelVersion."""
    return {
        "id": record.id,
        "model": model_json(record.model),
        "checkpoint": checkpoint_json(record.checkpoint),
        "version": record.version,
        "name": record.name,
        "comment": record.comment,
        "notes": record.notes,
        "metadata": dict(record.metadata),
        "labels": list(record.labels),
        "username": record.username,
        "userId": record.user_id,
        "creationTime": when(record.created),
        "lastUpdatedTime": when(record.updated),
    }


def template_json(record: Template) -> Dict:
    """Render a v1Template."""
    return {"name": record.name, "config": dict(record.config), "workspaceId": record.workspace_id}


_ONE_MODEL = f"{_MODELS}/{{modelName}}"
_ONE_VERSION = f"{_ONE_MODEL}/versions/{{modelVersionNum:int}}"
_ONE_TEMPLATE = f"{_TEMPLATES}/{{templateName}}"

ROUTES = (
    Route("GET", _MODELS, _models),
    Route("POST", _MODELS, _create),
    Route("GET", "/api/v1/model/labels", _labels),
    Route("GET", _ONE_MODEL, _model),
    Route("PATCH", _ONE_MODEL, _change),
    Route("DELETE", _ONE_MODEL, _delete),
    Route("POST", f"{_ONE_MODEL}/archive", _archive),
    Route("POST", f"{_ONE_MODEL}/unarchive", _archive),
    Route("GET", f"{_ONE_MODEL}/versions", _versions),
    Route("POST", f"{_ONE_MODEL}/versions", _register),
    Route("GET", _ONE_VERSION, _version),
    Route("PATCH", _ONE_VERSION, _change_version),
    Route("DELETE", _ONE_VERSION, _delete_version),
    Route("GET", _TEMPLATES, _templates),
    Route("GET", _ONE_TEMPLATE, _template),
    Route("POST", _ONE_TEMPLATE, _create_template),
    Route("PATCH", _ONE_TEMPLATE, _change_template),
    Route("DELETE", _ONE_TEMPLATE, _delete_template),
)
