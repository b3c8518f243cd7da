"""Routes of users: log in and out, who am I, and accounts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zero_trial.master import auth
from zero_trial.master.auth import digest
from zero_trial.master.errors import Conflict, Invalid, NotFound, PermissionDenied, Unsupported
from zero_trial.master.http import render_machine as render
from zero_trial.master.http.request import Request
from zero_trial.master.http.response import Response, ok
from zero_trial.master.http.router import AuthLevel, Route
from zero_trial.master.records import User

ROOT = "/api/v1/users"
_SMALL = 16 * 1024  # bytes; a login is read from anybody


def login(call: Request) -> Response:
    """POST /auth/login."""
    body = call.body()
    name, password = body.get("username"), body.get("password", "")
    if not isinstance(name, str) or not isinstance(password, str):
        raise Invalid("a login has a username and a password")
    user, token = auth.login(call.cluster.accounts, name, password, is_hashed=bool(body.get("isHashed", False)))
    return ok({"token": token, "user": render.user(user)})


def logout(call: Request) -> Response:
    """POST /auth/logout: the token that was sent is good for nothing any more."""
    token = call.request.head.bearer(auth.USER_HEADER)
    if token is not None:
        call.cluster.accounts.drop_token(digest(token))
    return Response()


def me(call: Request) -> Response:
    """GET /me and /auth/user."""
    if call.principal.user is None:
        raise PermissionDenied("this needs a user's token")
    return ok({"user": render.user(call.principal.user)})


def list_all(call: Request) -> Response:
    """GET /users."""
    active = call.request.first("active").lower()
    found = [user for user in call.cluster.accounts.users() if not active or user.active == (active == "true")]
    page, pagination = call.page(found)
    return ok({"users": [render.user(user) for user in page], "pagination": pagination})


def by_id(call: Request) -> Response:
    """GET /users/{userId}."""
    return ok({"user": render.user(_user(call))})


def by_name(call: Request) -> Response:
    """GET /users/{name}/by-username."""
    found = call.cluster.accounts.user(call.text("name"))
    if found is None:
        raise NotFound(f"there is no user {call.text('name')[:60]!r}")
    return ok({"user": render.user(found)})


def create(call: Request) -> Response:
    """POST /users."""
    call.require_admin()
    body = call.body()
    asked = body.get("user")
    if not isinstance(asked, dict) or not isinstance(asked.get("username"), str):
        raise Invalid("a new user has a username")
    if asked.get("remote"):
        raise Unsupported("remote users (of single sign-on) are not kept here; give the user a password")
    made = auth.add_user(
        call.cluster.accounts,
        asked["username"],
        _sent_password(body),
        admin=bool(asked.get("admin", False)),
        active=bool(asked.get("active", True)),
        display_name=str(asked.get("displayName") or ""),
    )
    return ok({"user": render.user(made)})


def patch(call: Request) -> Response:
    """PATCH /users/{userId}. Somebody who is no administrator changes only their own password and display name."""
    user, body = _user(call), call.body()
    own = call.principal.user is not None and call.principal.user.id == user.id
    if not own or any(body.get(name) is not None for name in ("active", "admin", "username")):
        call.require_admin()
    if body.get("remote") or body.get("agentUserGroup"):
        raise Unsupported("users have no agent user or single sign-on here: trials run as whoever runs the master")
    changed = _changed(user, body)
    if changed.name != user.name and call.cluster.accounts.user(changed.name) is not None:
        raise Conflict(f"there is a user {changed.name!r} already")
    if changed.name != user.name and user.name == auth.LOCAL_USER:
        raise Conflict(f"{auth.LOCAL_USER!r} keeps its name: it is whom Determined's clients are by default")
    if own and not (changed.active and changed.admin) and user.admin:
        raise Conflict("an administrator does not lock himself out")
    return ok({"user": render.user(call.cluster.accounts.put_user(changed))})


def _changed(user: User, body: dict[str, Any]) -> User:
    name = body.get("username")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise Invalid("username must be a text")
    changed = replace(
        user,
        name=user.name if name is None else name,
        active=user.active if body.get("active") is None else bool(body["active"]),
        admin=user.admin if body.get("admin") is None else bool(body["admin"]),
        display_name=user.display_name if body.get("displayName") is None else str(body["displayName"]),
    )
    if body.get("password") is not None:
        changed = replace(changed, password=auth.store_password(_sent_password(body)))
    return changed


def _sent_password(body: dict[str, Any]) -> str:
    """The password of a body as clients hash it. Invalid if there is none: an account without one would be everybody's."""
    password = body.get("password")
    if not isinstance(password, str) or not password:
        raise Invalid("a user needs a password")
    return password if body.get("isHashed") else auth.client_hash(password)


def _user(call: Request) -> User:
    number = call.number("userId")
    found = next((user for user in call.cluster.accounts.users() if user.id == number), None)
    if found is None:
        raise NotFound(f"there is no user {number}")
    return found


ROUTES = (
    Route("POST", "/api/v1/auth/login", login, AuthLevel.ANYBODY, limit=_SMALL),
    Route("POST", "/api/v1/auth/logout", logout),
    Route("GET", "/api/v1/auth/user", me),
    Route("GET", "/api/v1/me", me),
    Route("GET", ROOT, list_all),
    Route("POST", ROOT, create),
    Route("GET", f"{ROOT}/{{userId:int}}", by_id),
    Route("PATCH", f"{ROOT}/{{userId:int}}", patch),
    Route("GET", f"{ROOT}/{{name}}/by-username", by_name),
)
