"""Routes of users, workspaces and projects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from zero_trial.master.core.accounts import USER_HEADER, client_hash, digest, store_password
from zero_trial.master.core.registry import FIRST
from zero_trial.master.http.messages import AuthLevel, Dict, Request, Route, fields, text_in, when, whole
from zero_trial.master.records import Invalid, Project, Unsupported, User, Workspace, existing
from zero_trial.master.store import user_rows

_USERS = "/api/v1/users"
_SMALL = 16 * 1024  # bytes; a login body is read without a token


def _login(request: Request) -> Dict:
    body = request.body()
    name, password = body.get("username"), body.get("password", "")
    if not isinstance(name, str) or not isinstance(password, str):
        raise Invalid("a login needs a username and a password")
    user, token = request.master.accounts.login(name, password, is_hashed=bool(body.get("isHashed", False)))
    return {"token": token, "user": user_json(user)}


def _logout(request: Request) -> None:
    """Delete the token of the request."""
    token = request.head.bearer(USER_HEADER)
    if token is not None:
        request.master.accounts.drop_token(digest(token))


def _me(request: Request) -> Dict:
    """Return the sender; for an allocation, the owner of its experiment."""
    allocation = request.principal.allocation
    if allocation is None:
        return {"user": user_json(request.user)}
    return _user(request, request.master.experiments.get(allocation.experiment_id).owner)


def _list_users(request: Request) -> Dict:
    found = [user for user in request.master.accounts.users() if request.passes_switch("active", user.active)]
    return request.listed("users", found, user_json)


def _user(request: Request, who: str | int) -> Dict:
    """Return a user by name or id."""
    name = repr(who[:60]) if isinstance(who, str) else str(who)
    return {"user": user_json(existing(request.master.state.read(user_rows.user, who), f"user {name}"))}


def _create_user(request: Request) -> Dict:
    request.require_admin()
    body = request.body()
    asked = body.get("user")
    if not isinstance(asked, dict) or not isinstance(asked.get("username"), str):
        raise Invalid("a new user needs a username")
    if asked.get("remote"):
        raise Unsupported("remote users (of single sign-on) are not supported; give the user a password")
    made = request.master.accounts.add_user(
        asked["username"],
        _sent_password(body),
        admin=bool(asked.get("admin", False)),
        active=bool(asked.get("active", True)),
        display_name=str(asked.get("displayName") or ""),
    )
    return {"user": user_json(made)}


def _patch_user(request: Request) -> Dict:
    """Change a user. Non-administrators can change only their own password and display name."""
    body = request.body()
    columns = _changes(body)
    group, own = body.get("agentUserGroup"), {"agentUid": os.getuid(), "agentGid": os.getgid()}
    here = isinstance(group, dict) and all(group.get(name) == number for name, number in own.items())
    if body.get("remote") or (group and not here):
        raise Unsupported("users have no agent user or single sign-on here: trials run as the user who runs the master")
    token = request.head.bearer(USER_HEADER) or ""
    return {"user": user_json(request.master.accounts.change_user(request.number, token, **columns))}


def _changes(body: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a body changes. Raises Invalid."""
    name = text_in(body, "username")
    if name is not None and not name.strip():
        raise Invalid("username must be a non-empty string")
    columns: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "name": ("username", str),
        "active": ("active", bool),
        "admin": ("admin", bool),
        "display_name": ("displayName", str),
        "password": ("password", lambda _: store_password(_sent_password(body))),
    }
    return {column: read(body[key]) for column, (key, read) in columns.items() if body.get(key) is not None}


def _sent_password(body: dict[str, Any]) -> str:
    """Return a body's password as hashed by clients. Raises Invalid if there is none."""
    password = body.get("password")
    if not isinstance(password, str) or not password:
        raise Invalid("a user needs a password")
    return password if body.get("isHashed") else client_hash(password)


# -- responses, in the format of Determined's bindings


def user_json(record: User) -> Dict:
    """Render a v1User, without the password."""
    return {**fields(record, "id", "display_name", "admin", "active"), "username": record.name, "remote": False}


T = TypeVar("T", Workspace, Project)


def _list_workspaces(request: Request) -> Dict:
    found = _filtered(request, request.master.state.read(user_rows.workspaces, counted=True))
    ids = request.user_ids()
    return request.listed("workspaces", found, lambda each: _workspace_json(each, ids))


def _projects(request: Request) -> Dict:
    number = request.master.workspaces.get(request.number).id
    found = _filtered(request, request.master.state.read(user_rows.projects, number, counted=True))
    ids = request.user_ids()
    return request.listed("projects", found, lambda each: _project_json(each, ids))


def _filtered(request: Request, found: Sequence[T]) -> list[T]:
    """Return the items that match the request's filters, in the requested order."""
    part, exact = request.first("name").lower(), request.first("nameCaseSensitive")
    kept = [
        each
        for each in found
        if part in each.name.lower()
        and (not exact or each.name == exact)
        and request.passes_switch("archived", each.archived)
        and request.passes("users", each.owner)
    ]
    by_name = request.first("sortBy") == "SORT_BY_NAME"
    kept.sort(key=lambda each: (each.name.lower() if by_name else "", each.id), reverse=request.descending)
    return kept


def _create_workspace(request: Request) -> Dict:
    body = request.body()
    _refuse_settings(body)
    storage = _storage(request, body)
    made = request.master.workspaces.create(text_in(body, "name") or "", request.user, storage)
    return _shown(request, made, namespaceBindings={})


def _patch_workspace(request: Request) -> Dict:
    body = request.body()
    _refuse_settings(body)
    changes = {} if body.get("checkpointStorageConfig") is None else {"storage": _storage(request, body)}
    changed = request.master.workspaces.patch(request.number, request.user, text_in(body, "name"), **changes)
    return _shown(request, changed, namespaceBindings={})


def _refuse_settings(body: Mapping[str, Any]) -> None:
    """Raise Unsupported for settings that do not apply to a single machine."""
    for name in ("agentUserGroup", "clusterNamespaceMeta", "clusterQuotaPairs"):
        if body.get(name):
            raise Unsupported(f"{name}: trials run on this machine as the user who runs the master, without namespaces")


def _storage(request: Request, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a checkpoint_storage, checked for experiments; None if not set. Raises Invalid."""
    section = body.get("checkpointStorageConfig")
    if not section:
        return None
    if not isinstance(section, dict):
        raise Invalid("checkpointStorageConfig must be an object")
    request.master.experiments.check_storage(section)
    return section


def _switch(operation: str, on: bool) -> Callable[[Request], None]:
    """Return an action that archives or unarchives the object in the path."""
    return lambda request: getattr(request.master.workspaces, operation)(request.number, request.user, on)


def _shown(request: Request, found: Workspace, **more: Any) -> Dict:
    return {"workspace": _workspace_json(found, request.user_ids()), **more}


# -- projects


def _create_project(request: Request) -> Dict:
    body = request.body()
    made = request.master.workspaces.create_project(
        request.number,
        text_in(body, "name") or "",
        request.user,
        text_in(body, "description") or "",
        text_in(body, "key") or None,
    )
    return _project_shown(request, made)


def _patch_project(request: Request) -> Dict:
    body = request.body()
    names = text_in(body, "name"), text_in(body, "description")
    return _project_shown(request, request.master.workspaces.patch_project(request.number, request.user, *names))


def _put_notes(request: Request) -> Dict:
    sent = request.body().get("notes")
    if not isinstance(sent, list) or not all(isinstance(each, dict) for each in sent):
        raise Invalid("notes must be a list of objects")
    notes = [{name: text_in(each, name) or "" for name in ("name", "contents")} for each in sent]
    request.master.workspaces.set_notes(request.number, notes)
    return {"notes": notes}


def _move_experiment(request: Request) -> None:
    target = whole(request.body().get("destinationProjectId"), "destinationProjectId")
    found = request.master.experiments.get(request.number)
    request.require_owner(found.owner, f"experiment {found.id}")
    request.master.workspaces.move_experiment(found.id, target)


def _project_shown(request: Request, found: Project) -> Dict:
    return {"project": _project_json(found, request.user_ids())}


# -- responses, in the format of Determined's bindings


def _workspace_json(record: Workspace, ids: Mapping[str, int]) -> Dict:
    """Render a v1Workspace, without pins, which only the web UI shows."""
    return {
        **fields(record, "id", "name", "archived"),
        "checkpointStorageConfig": record.storage,
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
    same = ("id", "name", "key", "description", "archived", "notes", "workspace_id", "workspace_name")
    return {
        **fields(record, *same),
        "errorMessage": "",
        "immutable": record.id == FIRST,
        "lastExperimentStartedAt": when(record.last_started),
        "numActiveExperiments": record.active,
        "numExperiments": record.experiments,
        "numRuns": record.experiments,
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": ids.get(record.owner, 0),
        "username": record.owner,
    }


_WORKSPACE = "/api/v1/workspaces/{workspaceId:int}"
_PROJECT = "/api/v1/projects/{projectId:int}"


ROUTES = (
    Route("POST", "/api/v1/auth/login", _login, AuthLevel.PUBLIC, limit=_SMALL),
    Route("POST", "/api/v1/auth/logout", _logout),
    Route("GET", "/api/v1/me", _me, AuthLevel.BOTH),
    Route("GET", _USERS, _list_users),
    Route("POST", _USERS, _create_user),
    Route("GET", f"{_USERS}/{{userId:int}}", lambda call: _user(call, call.number)),
    Route("PATCH", f"{_USERS}/{{userId:int}}", _patch_user),
    Route("GET", f"{_USERS}/{{name}}/by-username", lambda call: _user(call, call.args["name"])),
    Route("GET", "/api/v1/workspaces", _list_workspaces),
    Route("POST", "/api/v1/workspaces", _create_workspace),
    Route("GET", _WORKSPACE, lambda call: _shown(call, call.master.workspaces.get(call.number))),
    Route("PATCH", _WORKSPACE, _patch_workspace),
    Route("DELETE", _WORKSPACE, lambda call: {"completed": call.master.workspaces.delete(call.number, call.user)}),
    Route("POST", f"{_WORKSPACE}/archive", _switch("archive", True)),
    Route("POST", f"{_WORKSPACE}/unarchive", _switch("archive", False)),
    Route("GET", f"{_WORKSPACE}/projects", _projects),
    Route("POST", f"{_WORKSPACE}/projects", _create_project),
    Route("GET", _PROJECT, lambda call: _project_shown(call, call.master.workspaces.project(call.number))),
    Route("PATCH", _PROJECT, _patch_project),
    Route(
        "DELETE", _PROJECT, lambda call: {"completed": call.master.workspaces.delete_project(call.number, call.user)}
    ),
    Route("POST", f"{_PROJECT}/archive", _switch("archive_project", True)),
    Route("POST", f"{_PROJECT}/unarchive", _switch("archive_project", False)),
    Route("PUT", f"{_PROJECT}/notes", _put_notes),
    Route("POST", "/api/v1/experiments/{experimentId:int}/move", _move_experiment),
)
