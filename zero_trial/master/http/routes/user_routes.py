"""Routes of users: log in and out, who am I, and accounts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from zero_trial.master.core.accounts import USER_HEADER, client_hash, digest, store_password
from zero_trial.master.http.messages import AuthLevel, Dict, Request, Response, Route, ok
from zero_trial.master.records import Invalid, NotFound, Unsupported, User, existing
from zero_trial.master.store import user_rows

_ROOT = "/api/v1/users"
_SMALL = 16 * 1024  # bytes; a login is read without a token


def _login(request: Request) -> Response:
    body = request.body()
    name, password = body.get("username"), body.get("password", "")
    if not isinstance(name, str) or not isinstance(password, str):
        raise Invalid("a login has a username and a password")
    user, token = request.master.accounts.login(name, password, is_hashed=bool(body.get("isHashed", False)))
    return ok({"token": token, "user": user_json(user)})


def _logout(request: Request) -> Response:
    """Delete the token that was sent."""
    token = request.head.bearer(USER_HEADER)
    if token is not None:
        request.master.accounts.drop_token(digest(token))
    return Response()


def _me(request: Request) -> Response:
    """Return the sender; of an allocation, the owner of its experiment."""
    allocation = request.principal.allocation
    if allocation is None:
        return ok({"user": user_json(request.user)})
    owner = request.master.experiments.get(allocation.experiment_id).owner
    return ok({"user": user_json(existing(request.master.accounts.user(owner), f"user {owner}"))})


def _list_all(request: Request) -> Response:
    active = request.first("active").lower()
    found = [user for user in request.master.accounts.users() if not active or user.active == (active == "true")]
    page, pagination = request.page(found)
    return ok({"users": [user_json(user) for user in page], "pagination": pagination})


def _by_id(request: Request) -> Response:
    return ok({"user": user_json(_user(request))})


def _by_name(request: Request) -> Response:
    found = request.master.accounts.user(request.args["name"])
    if found is None:
        raise NotFound(f"user {request.args['name'][:60]!r} not found")
    return ok({"user": user_json(found)})


def _create(request: Request) -> Response:
    request.require_admin()
    body = request.body()
    asked = body.get("user")
    if not isinstance(asked, dict) or not isinstance(asked.get("username"), str):
        raise Invalid("a new user has a username")
    if asked.get("remote"):
        raise Unsupported("remote users (of single sign-on) are not supported; give the user a password")
    made = request.master.accounts.add_user(
        asked["username"],
        _sent_password(body),
        admin=bool(asked.get("admin", False)),
        active=bool(asked.get("active", True)),
        display_name=str(asked.get("displayName") or ""),
    )
    return ok({"user": user_json(made)})


def _patch(request: Request) -> Response:
    """Change a user. Only administrators change more than their own password and shown name."""
    body = request.body()
    columns = _changes(body)
    if body.get("remote") or not _runs_trials(body.get("agentUserGroup")):
        raise Unsupported("users have no agent user or single sign-on here: trials run as the user who runs the master")
    token = request.head.bearer(USER_HEADER) or ""
    changed = request.master.accounts.change_user(request.numbers["userId"], token, **columns)
    return ok({"user": user_json(changed)})


def _runs_trials(group: Any) -> bool:
    """Return whether an agent user and group are those of this master, in which trials run."""
    own = {"agentUid": os.getuid(), "agentGid": os.getgid()}
    return not group or (isinstance(group, dict) and all(group.get(name) == number for name, number in own.items()))


def _changes(body: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a body changes. Raises Invalid."""
    name = body.get("username")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise Invalid("username must be a text")
    columns: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "name": ("username", str),
        "active": ("active", bool),
        "admin": ("admin", bool),
        "display_name": ("displayName", str),
        "password": ("password", lambda _: store_password(_sent_password(body))),
    }
    return {column: read(body[key]) for column, (key, read) in columns.items() if body.get(key) is not None}


def _sent_password(body: dict[str, Any]) -> str:
    """Return a body's password as clients hash it. Raises Invalid if there is none."""
    password = body.get("password")
    if not isinstance(password, str) or not password:
        raise Invalid("a user needs a password")
    return password if body.get("isHashed") else client_hash(password)


def _user(request: Request) -> User:
    number = request.numbers["userId"]
    return existing(request.master.state.read(user_rows.user, number), f"user {number}")


# -- what the answers contain, in the shapes of Determined's bindings


def user_json(record: User) -> Dict:
    """Render a v1User, without the password."""
    return {
        "id": record.id,
        "username": record.name,
        "displayName": record.display_name,
        "admin": record.admin,
        "active": record.active,
        "remote": False,
    }


ROUTES = (
    Route("POST", "/api/v1/auth/login", _login, AuthLevel.PUBLIC, limit=_SMALL),
    Route("POST", "/api/v1/auth/logout", _logout),
    Route("GET", "/api/v1/me", _me, AuthLevel.BOTH),
    Route("GET", _ROOT, _list_all),
    Route("POST", _ROOT, _create),
    Route("GET", f"{_ROOT}/{{userId:int}}", _by_id),
    Route("PATCH", f"{_ROOT}/{{userId:int}}", _patch),
    Route("GET", f"{_ROOT}/{{name}}/by-username", _by_name),
)
