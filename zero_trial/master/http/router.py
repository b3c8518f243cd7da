"""Which function answers which method and path; and what Determined can do and this master cannot, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from zero_trial.errors import ZeroTrialError

if TYPE_CHECKING:
    from zero_trial.master.http.request import Request
    from zero_trial.master.http.response import Response, StreamingResponse

Action = Callable[["Request"], "Response | StreamingResponse"]

SMALL_BODY = 8 * 1024 * 1024  # bytes


class AuthLevel(Enum):
    """The tokens that a route takes."""

    ANYBODY = "anybody"  # none is asked for
    USER = "user"
    TASK = "task"
    BOTH = "both"


@dataclass(frozen=True)
class Route:
    """One method and path. A part ``{name}`` is any text, ``{name:int}`` a number. ``limit``: bytes of body that are read."""

    method: str
    path: str
    action: Action
    level: AuthLevel = AuthLevel.USER
    limit: int = SMALL_BODY


class RouteNode:
    """One part of a path: what may come after it, and which methods end at it."""

    def __init__(self) -> None:
        self.literal: dict[str, RouteNode] = {}
        self.wild: RouteNode | None = None
        self.methods: dict[str, tuple[Route, Sequence[tuple[str, bool]]]] = {}


@dataclass(frozen=True)
class RouteMatch:
    """A route and the named parts of the path that led to it; ``numbers`` are those that must be numbers."""

    route: Route
    args: Mapping[str, str]
    numbers: Sequence[str]


class Router:
    """All routes, prepared once."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = RouteNode()
        for route in routes:
            self._add(route)

    def find(self, method: str, parts: Sequence[str]) -> RouteMatch | None:
        """The route of a path that was split at its slashes; literal parts win over named ones. None if there is none."""
        values: list[str] = []
        node = self._walk(self._root, parts, 0, values, method)
        if node is None:
            return None
        route, names = node.methods[method]
        args = {name: value for (name, _), value in zip(names, values, strict=True)}
        return RouteMatch(route, args, [name for name, number in names if number])

    def _walk(self, node: RouteNode, parts: Sequence[str], at: int, values: list[str], method: str) -> RouteNode | None:
        if at == len(parts):
            return node if method in node.methods else None
        literal = node.literal.get(parts[at])
        if literal is not None and (found := self._walk(literal, parts, at + 1, values, method)) is not None:
            return found
        if node.wild is None or not parts[at]:
            return None
        values.append(parts[at])
        found = self._walk(node.wild, parts, at + 1, values, method)
        if found is None:
            values.pop()
        return found

    def _add(self, route: Route) -> None:
        node, names = self._root, []
        for part in route.path.strip("/").split("/"):
            if part.startswith("{"):
                name, _, kind = part[1:-1].partition(":")
                names.append((name, kind == "int"))
                node.wild = node.wild or RouteNode()
                node = node.wild
            else:
                node = node.literal.setdefault(part, RouteNode())
        if route.method in node.methods:
            raise ZeroTrialError("two routes for one method and path", where=f"{route.method} {route.path}")
        node.methods[route.method] = (route, names)


# -- what is not supported: one line for each part of the API

_NO_TASKS = "notebooks, shells, commands and TensorBoard tasks are not run by the embedded master"
_PLAIN = "run the program itself; it is on this machine"
_NO_ROLES = "there are no roles, groups and policies in the embedded master, only users and administrators"

_UNSUPPORTED: Mapping[str, str] = {
    "/api/v1/notebooks": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/shells": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/commands": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/tensorboards": f"{_NO_TASKS}: run 'tensorboard --logdir' on the experiment's tensorboard directory",
    "/api/v1/generic-tasks": "generic tasks are not run by the embedded master: submit an experiment",
    "/api/v1/templates": "templates are not kept by the embedded master: write what they say into the experiment's configuration",
    "/api/v1/models": "there is no model registry in the embedded master: download the checkpoint by its UUID",
    "/api/v1/model": "there is no model registry in the embedded master: download the checkpoint by its UUID",
    "/api/v1/webhooks": "the embedded master sends no webhooks",
    "/api/v1/groups": _NO_ROLES,
    "/api/v1/roles": _NO_ROLES,
    "/api/v1/permissions": _NO_ROLES,
    "/api/v1/config-policies": _NO_ROLES,
    "/api/v1/tokens": "access tokens are not made over HTTP: the local user's lies in the master's directory",
    "/api/v1/workspaces": "there is one workspace, Uncategorized, with one project; others are not made by the embedded master",
    "/api/v1/projects": "there is one workspace, Uncategorized, with one project; others are not made by the embedded master",
    "/api/v1/resource-pools": "there is one resource pool; it is bound to the one workspace for good",
    "/api/v1/resources": "the embedded master keeps no account of used resources",
    "/resources": "the embedded master keeps no account of used resources",
    "/api/v1/master/config": "the master's configuration is given to 'zero-trial master up'",
    "/api/v1/master/cluster_message": "the embedded master has no message of the day",
    "/api/v1/master/telemetry": "the embedded master sends no telemetry",
    "/api/v1/preview-hp-search": "searches are previewed by 'zero-trial simulate EXPERIMENT.yaml', which needs no master",
    "/api/v1/task": "logs are deleted with their experiment, not before",
    "/api/v1/tasks": "tasks are steered through their experiment: det experiment pause, activate, kill",
    "/api/v1/cleanup_logs": "logs are deleted with their experiment, not before",
    "/api/v1/trial-source-info": "the embedded master does not track which trial used which checkpoint",
    "/oauth2": "the embedded master has no single sign-on",
    "/saml": "the embedded master has no single sign-on",
    "/oidc": "the embedded master has no single sign-on",
    "/scim": "the embedded master has no single sign-on",
    "/proxy": "ports of tasks are not forwarded: they are on this machine",
}
_UNSUPPORTED_ENDINGS: Mapping[str, str] = {
    "/retain_logs": "logs are kept until their experiment is deleted",
    "/move": "there is one project; experiments stay in it",
    "/tensorboard-files": "TensorBoard files are deleted with their experiment, not before",
    "/metadata": "metadata of checkpoints is not changed after they were saved",
    "/all_gather": "only containers of one machine are run, which need no all-gather",
    "/proxy_address": "ports of tasks are not forwarded: they are on this machine",
}


def why_unsupported(path: str) -> str | None:
    """Say why a path is not answered although Determined has it; None for an unknown path."""
    path = path.rstrip("/")
    for ending, why in _UNSUPPORTED_ENDINGS.items():
        if path.endswith(ending):
            return why
    while path:
        if path in _UNSUPPORTED:
            return _UNSUPPORTED[path]
        path = path.rpartition("/")[0]
    return None
