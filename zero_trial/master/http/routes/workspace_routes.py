"""Routes of workspaces and projects, and the moving of experiments between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from zero_trial.master.core.registry import FIRST
from zero_trial.master.http.messages import Dict, Request, Response, Route, maybe_when, ok, whole
from zero_trial.master.records import Invalid, Project, Unsupported, Workspace
from zero_trial.master.store import user_rows

T = TypeVar("T", Workspace, Project)


def _list_all(request: Request) -> Response:
    found = _filtered(request, request.master.state.read(user_rows.workspaces, counted=True))
    page, pagination = request.page(found)
    ids = request.user_ids()
    return ok({"workspaces": [_workspace_json(each, ids) for each in page], "pagination": pagination})


def _projects(request: Request) -> Response:
    number = request.master.workspaces.get(request.numbers["workspaceId"]).id
    found = _filtered(request, request.master.state.read(user_rows.projects, number, counted=True))
    page, pagination = request.page(found)
    ids = request.user_ids()
    return ok({"projects": [_project_json(each, ids) for each in page], "pagination": pagination})


def _filtered(request: Request, found: Sequence[T]) -> list[T]:
    """Return those that a list asks for, in its order."""
    part, exact = request.first("name").lower(), request.first("nameCaseSensitive")
    archived, users = request.first("archived"), set(request.query_all("users"))
    kept = [
        each
        for each in found
        if part in each.name.lower()
        and (not exact or each.name == exact)
        and (not archived or each.archived == (archived == "true"))
        and (not users or each.owner in users)
    ]
    by_name = request.first("sortBy") == "SORT_BY_NAME"
    kept.sort(
        key=lambda each: (each.name.lower() if by_name else "", each.id),
        reverse=request.first("orderBy") == "ORDER_BY_DESC",
    )
    return kept


def _get(request: Request) -> Response:
    return _shown(request, request.master.workspaces.get(request.numbers["workspaceId"]))


def _create(request: Request) -> Response:
    body = request.body()
    _refuse_settings(body)
    storage = _storage(request, body)
    made = request.master.workspaces.create(_text(body, "name") or "", request.user, storage)
    return _shown(request, made, namespaceBindings={})


def _patch(request: Request) -> Response:
    body = request.body()
    _refuse_settings(body)
    changes = {} if body.get("checkpointStorageConfig") is None else {"storage": _storage(request, body)}
    number = request.numbers["workspaceId"]
    changed = request.master.workspaces.patch(number, request.user, _text(body, "name"), **changes)
    return _shown(request, changed, namespaceBindings={})


def _refuse_settings(body: Mapping[str, Any]) -> None:
    """Raise Unsupported for settings that have no meaning on one machine."""
    for name in ("agentUserGroup", "clusterNamespaceMeta", "clusterQuotaPairs"):
        if body.get(name):
            raise Unsupported(f"{name}: trials run on this machine as the user who runs the master, without namespaces")


def _storage(request: Request, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a checkpoint_storage that experiments may have; None for none. Raises Invalid."""
    section = body.get("checkpointStorageConfig")
    if not section:
        return None
    if not isinstance(section, dict):
        raise Invalid("checkpointStorageConfig must be an object")
    request.master.experiments.check_storage(section)
    return section


def _switch(operation: str, part: str, on: bool) -> Callable[[Request], Response]:
    """Return the action that archives what ``part`` of the path names, or undoes it."""

    def action(request: Request) -> Response:
        getattr(request.master.workspaces, operation)(request.numbers[part], request.user, on)
        return Response()

    return action


def _delete(request: Request) -> Response:
    return ok({"completed": request.master.workspaces.delete(request.numbers["workspaceId"], request.user)})


def _shown(request: Request, found: Workspace, **more: Any) -> Response:
    return ok({"workspace": _workspace_json(found, request.user_ids()), **more})


# -- projects


def _get_project(request: Request) -> Response:
    return _project_shown(request, request.master.workspaces.project(request.numbers["projectId"]))


def _create_project(request: Request) -> Response:
    body = request.body()
    made = request.master.workspaces.create_project(
        request.numbers["workspaceId"],
        _text(body, "name") or "",
        request.user,
        _text(body, "description") or "",
        _text(body, "key") or None,
    )
    return _project_shown(request, made)


def _patch_project(request: Request) -> Response:
    body = request.body()
    names = _text(body, "name"), _text(body, "description")
    return _project_shown(
        request, request.master.workspaces.patch_project(request.numbers["projectId"], request.user, *names)
    )


def _delete_project(request: Request) -> Response:
    return ok({"completed": request.master.workspaces.delete_project(request.numbers["projectId"], request.user)})


def _put_notes(request: Request) -> Response:
    sent = request.body().get("notes")
    if not isinstance(sent, list) or not all(isinstance(each, dict) for each in sent):
        raise Invalid("notes must be a list of objects")
    notes = [{name: _text(each, name) or "" for name in ("name", "contents")} for each in sent]
    request.master.workspaces.set_notes(request.numbers["projectId"], notes)
    return ok({"notes": notes})


def _move_experiment(request: Request) -> Response:
    target = whole(request.body().get("destinationProjectId"), "destinationProjectId")
    found = request.master.experiments.get(request.numbers["experimentId"])
    request.require_owner(found.owner, f"experiment {found.id}")
    request.master.workspaces.move_experiment(found.id, target)
    return Response()


def _project_shown(request: Request, found: Project) -> Response:
    return ok({"project": _project_json(found, request.user_ids())})


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if not isinstance(value, str | None):
        raise Invalid(f"{name} must be a text")
    return value


# -- what the answers contain, in the shapes of Determined's bindings


def _workspace_json(record: Workspace, ids: Mapping[str, int]) -> Dict:
    """Render a v1Workspace; there are no pins, which only a web page shows."""
    return {
        "id": record.id,
        "name": record.name,
        "archived": record.archived,
        "checkpointStorageConfig": None if record.storage is None else dict(record.storage),
        "errorMessage": "",
        "immutable": record.id == FIRST,
        "numExperiments": record.experiments,
        "numProjects": record.projects,
        "pinned": False,
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": ids.get(record.owner, 0),
        "username": record.owner,
    }


def _project_json(record: Project, ids: Mapping[str, int]) -> Dict:
    """Render a v1Project."""
    return {
        "id": record.id,
        "name": record.name,
        "key": record.key,
        "description": record.description,
        "archived": record.archived,
        "errorMessage": "",
        "immutable": record.id == FIRST,
        "notes": [dict(note) for note in record.notes],
        "lastExperimentStartedAt": maybe_when(record.last_started),
        "numActiveExperiments": record.active,
        "numExperiments": record.experiments,
        "numRuns": record.experiments,
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": ids.get(record.owner, 0),
        "username": record.owner,
        "workspaceId": record.workspace_id,
        "workspaceName": record.workspace_name,
    }


_WORKSPACE = "/api/v1/workspaces/{workspaceId:int}"
_PROJECT = "/api/v1/projects/{projectId:int}"

ROUTES = (
    Route("GET", "/api/v1/workspaces", _list_all),
    Route("POST", "/api/v1/workspaces", _create),
    Route("GET", _WORKSPACE, _get),
    Route("PATCH", _WORKSPACE, _patch),
    Route("DELETE", _WORKSPACE, _delete),
    Route("POST", f"{_WORKSPACE}/archive", _switch("archive", "workspaceId", True)),
    Route("POST", f"{_WORKSPACE}/unarchive", _switch("archive", "workspaceId", False)),
    Route("GET", f"{_WORKSPACE}/projects", _projects),
    Route("POST", f"{_WORKSPACE}/projects", _create_project),
    Route("GET", _PROJECT, _get_project),
    Route("PATCH", _PROJECT, _patch_project),
    Route("DELETE", _PROJECT, _delete_project),
    Route("POST", f"{_PROJECT}/archive", _switch("archive_project", "projectId", True)),
    Route("POST", f"{_PROJECT}/unarchive", _switch("archive_project", "projectId", False)),
    Route("PUT", f"{_PROJECT}/notes", _put_notes),
    Route("POST", "/api/v1/experiments/{experimentId:int}/move", _move_experiment),
)
