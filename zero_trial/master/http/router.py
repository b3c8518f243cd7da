"""Which function answers which method and path, found in one step per part of the path."""

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
    """Whose token a route takes."""

    ANYBODY = "anybody"  # no token is looked at
    USER = "user"
    TASK = "task"
    BOTH = "both"


@dataclass(frozen=True)
class Route:
    """One method and path. A part ``{name}`` is any text, ``{name:int}`` a number. ``limit``: bytes of body that are read."""

    method: str
    path: str
    action: Action
    who: AuthLevel = AuthLevel.USER
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
