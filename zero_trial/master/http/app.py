"""The master over HTTP: the checks that every request passes before its route, and the server.

Checks, in order: Host, Origin, route, token, body size. For a request without a valid token, only
the headers are read. Errors are returned as one JSON object; an unexpected exception is returned as
a 500 and logged with a traceback, and the server continues.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from zero_trial.errors import ZeroTrialError
from zero_trial.master.core import Master
from zero_trial.master.core.accounts import TASK_HEADER, USER_HEADER, Principal, require_own
from zero_trial.master.http import (
    account_routes,
    checkpoint_routes,
    experiment_routes,
    machine_routes,
    trial_routes,
)
from zero_trial.master.http.messages import (
    SMALL_BODY,
    AuthLevel,
    BadRequest,
    Request,
    RequestHead,
    Response,
    Route,
    StreamingResponse,
    Waits,
    encode,
    failure,
    parse_query,
    refuse_foreign,
    split_path,
    whole,
)
from zero_trial.master.http.server import LOOPBACK, THREADS, HttpServer, ReadBody
from zero_trial.master.records import (
    Conflict,
    Invalid,
    NotFound,
    PermissionDenied,
    ServiceError,
    Unavailable,
    Unsupported,
)

log = logging.getLogger(__name__)
_STATUS: dict[type[ServiceError], int] = {NotFound: 404, Conflict: 409, Invalid: 400, Unsupported: 501}
_NAMES = {"allocationId": "allocation_id", "taskId": "task_id", "resourcesId": "resources_id"}
_NUMBERS = {"trialId": "trial_id", "experimentId": "experiment_id"}
_FREE = frozenset({"uuid"})  # the route itself checks access to a checkpoint
_TINY_BODY = 256 * 1024  # bytes; smaller bodies need no semaphore
_RETRY_SECONDS = 60  # between a trial's retries while the store is unavailable
_ANONYMOUS = Principal()


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """A route and the named parts of its path. ``numbers``: names of the integer parts."""

    route: Route
    args: Mapping[str, str]
    numbers: Sequence[str]


_Parts = list[tuple[int, str]]  # path parts with their indices


class Router:
    """All routes, by method and number of parts; the most literal match wins."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[tuple[str, int], list[tuple[_Parts, _Parts, Route]]] = {}
        for route in sorted(routes, key=lambda route: [part[:1] == "{" for part in route.path.split("/")]):
            parts = list(enumerate(route.path.strip("/").split("/")))
            literal = [(at, part) for at, part in reversed(parts) if part[:1] != "{"]  # last parts differ most
            named = [(at, part[1:-1]) for at, part in parts if part[:1] == "{"]
            self._routes.setdefault((route.method, len(parts)), []).append((literal, named, route))

    def find(self, method: str, parts: Sequence[str]) -> RouteMatch | None:
        """Return the route for a path split at slashes; None if there is none."""
        for literal, named, route in self._routes.get((method, len(parts)), ()):
            if all(parts[at] == part for at, part in literal) and all(parts[at] for at, _ in named):
                args = {name.removesuffix(":int"): parts[at] for at, name in named}
                return RouteMatch(route, args, [name[:-4] for _, name in named if name.endswith(":int")])
        return None


class Application:
    """Answers requests to one master; many threads call it concurrently."""

    def __init__(self, master: Master, router: Router, *, host: str = LOOPBACK, port: int, waits: int) -> None:
        self._master = master
        self._router = router
        self._hosts = {f"{name}:{port}" for name in (host.lower(), *(("localhost",) if host == LOOPBACK else ()))}
        self._waits = Waits(waits)
        # concurrent logins: checking a password needs 16 MiB
        self._logins = threading.BoundedSemaphore(4)
        # Concurrent bodies in memory. A parsed body needs up to 100 times its size.
        self._places = {SMALL_BODY: threading.BoundedSemaphore(2), _TINY_BODY: threading.BoundedSemaphore(4)}

    def __call__(self, head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
        """Answer one request. Never raises."""
        try:
            return self._answer(head, read_body)
        except BadRequest as error:
            return failure(error.status, str(error))
        except PermissionDenied as error:
            return failure(403, error.what)  # clients compare the message of a rejected login
        except Unavailable as error:
            return self._unavailable(head, str(error), full=error.full)
        except ServiceError as error:
            return failure(_STATUS.get(type(error), 400), str(error))
        except ZeroTrialError as error:
            log.error("%s %s failed: %s", head.method, head.path, error)
            return failure(500, str(error))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                return self._unavailable(head, f"the master's disk is full: {error}", full=True)
            log.exception("%s %s failed", head.method, head.path)
            return failure(500, f"{type(error).__name__} in the master; its log has the traceback")

    def _answer(self, head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
        refusal = refuse_foreign(head, self._hosts)
        if refusal is not None:
            return refusal
        # the server omits the body of the response
        method = "GET" if head.method == "HEAD" else head.method
        found = self._router.find(method, split_path(head.path))
        principal = self._principal(head, found)
        if principal is None:
            return failure(401, "this request needs a token: see 'zero-trial master up --env'")
        if found is None:
            log.warning("no route for %s %s (requested by %s)", head.method, head.path[:200], principal.name)
            why, asked = why_unsupported(head.path), f"{head.method} {head.path[:200]}"
            if why is not None:
                return failure(501, why)
            return failure(
                404, f"{asked} is not supported by the embedded master, which serves det, the SDK and trials"
            )
        numbers = {name: whole(found.args[name], name) for name in found.numbers}
        self._scope(found, numbers, principal)
        with self._place_for_body(head, found):
            content = read_body(found.route.limit)
            query = parse_query(head.query_text)
            request = Request(self._master, head, found.args, numbers, query, content, principal, self._waits)
            with self._logins if found.route.level is AuthLevel.PUBLIC and head.method == "POST" else nullcontext():
                answer = found.route.action(request)
            return answer if isinstance(answer, Response | StreamingResponse) else Response(200, encode(answer or {}))

    def _unavailable(self, head: RequestHead, why: str, *, full: bool) -> Response:
        """Answer a request that may succeed later. The harness in a trial retries up to 20 times,
        at the interval in the response, before the trial fails."""
        log.warning("%s %s is not possible now: %s", head.method, head.path, why)
        found = self._router.find(head.method, split_path(head.path))
        # an unmanaged trial reports its state with a user token
        of_trials = AuthLevel.TASK, AuthLevel.BOTH
        if found is not None and (found.route.level in of_trials or found.route.path.startswith("/api/v1/trials")):
            return replace(failure(503, why), headers={"Retry-After": str(_RETRY_SECONDS)})
        return failure(507 if full else 503, why)

    def _principal(self, head: RequestHead, found: RouteMatch | None) -> Principal | None:
        level = found.route.level if found is not None else AuthLevel.BOTH
        if level is AuthLevel.PUBLIC:
            return _ANONYMOUS
        user = head.bearer(USER_HEADER) if level is not AuthLevel.TASK else None
        task = head.bearer(TASK_HEADER)
        principal = self._master.accounts.identify(user, task)
        if principal is not None and principal.allocation is not None and level is AuthLevel.USER:
            raise PermissionDenied("the token of an allocation does not permit this")
        return principal

    def _scope(self, found: RouteMatch, numbers: dict[str, int], principal: Principal) -> None:
        """Raise PermissionDenied if an allocation names a part of the path that is not its own."""
        if principal.allocation is None:
            return
        unknown = found.args.keys() - _NAMES.keys() - _NUMBERS.keys() - _FREE
        if unknown:  # deny access to parts that cannot be compared
            raise PermissionDenied(f"the token of an allocation does not permit access to {', '.join(sorted(unknown))}")
        asked: dict[str, object] = {_NAMES[name]: value for name, value in found.args.items() if name in _NAMES}
        asked |= {_NUMBERS[name]: value for name, value in numbers.items() if name in _NUMBERS}
        require_own(principal.allocation, **asked)

    @contextmanager
    def _place_for_body(self, head: RequestHead, found: RouteMatch) -> Iterator[None]:
        """Hold a semaphore for bodies of this size while the body is read and handled."""
        most = min(head.length, found.route.limit)
        places = next((places for size, places in self._places.items() if most > size), None)
        if places is None:
            yield
            return
        if not places.acquire(timeout=60):
            raise Unavailable("other large requests are in progress", full=False, fix="Retry this request.")
        try:
            yield
        finally:
            places.release()


def listen(
    master: Master,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    threads: int = THREADS,
    more: Sequence[Route] = (),
) -> HttpServer:
    """Start a server that answers for ``master``, in background threads until ``close``.

    At most three quarters of the threads may wait in long polls and followed logs, so that threads
    remain for immediate requests. Raises ZeroTrialError if the port is in use.

    Args:
        host: the address of this machine for clients; by default only this machine can connect.
        port: 0 selects a free port.
        threads: the maximum number of concurrent requests.
        more: additional routes, not part of Determined's API.
    """
    server = HttpServer(host=host, port=port, threads=threads)
    router, waits = Router([*all_routes(), *more]), max(1, threads * 3 // 4)
    server.start(Application(master, router, host=host, port=server.port, waits=waits))
    return server


def all_routes() -> Iterator[Route]:
    """Yield every supported route; the order does not matter."""
    for part in (account_routes, checkpoint_routes, experiment_routes, machine_routes, trial_routes):
        yield from part.ROUTES


# -- unsupported parts of Determined's API, with one message for each

_NO_TASKS = "the embedded master does not run notebooks, shells, commands or TensorBoard tasks"
_PLAIN = "run the program directly; it is on this machine"
_NO_ROLES = "the embedded master has no roles, groups or policies, only users and administrators"

_UNSUPPORTED: Mapping[str, str] = {
    "/api/v1/notebooks": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/shells": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/commands": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/tensorboards": f"{_NO_TASKS}: the live page shows the curves (zero-trial master up prints its address); for files that "
    "a trial writes, run 'tensorboard --logdir STORAGE', where STORAGE is the host_path of the experiment's checkpoint_storage",
    "/api/v1/generic-tasks": "the embedded master does not run generic tasks: submit an experiment",
    "/api/v1/webhooks": "the embedded master sends no webhooks",
    "/api/v1/groups": _NO_ROLES,
    "/api/v1/roles": _NO_ROLES,
    "/api/v1/permissions": _NO_ROLES,
    "/api/v1/config-policies": _NO_ROLES,
    "/api/v1/tokens": "access tokens are not created over HTTP: the local user's token is in the master's directory",
    "/api/v1/workspaces": "workspaces of the embedded master have no namespaces, quotas, roles or pins",
    "/api/v1/resource-pools": "resource pools cannot be bound to a workspace: each pool serves all workspaces",
    "/api/v1/resources": "the embedded master does not record resource usage",
    "/resources": "the embedded master does not record resource usage",
    "/api/v1/master/config": "the master's configuration is passed to 'zero-trial master up'",
    "/api/v1/master/cluster_message": "the embedded master has no message of the day",
    "/api/v1/tasks": "tasks are controlled through their experiment: det experiment pause, activate, kill",
    "/api/v1/cleanup_logs": "logs are deleted with their experiment, not before",
    "/api/v1/trial-source-info": "the embedded master does not track which trial used which checkpoint",
    "/oauth2": "the embedded master has no single sign-on",
    "/proxy": "ports of tasks are not forwarded: the tasks run on this machine",
}
_UNSUPPORTED_ENDINGS: Mapping[str, str] = {
    "/metrics": "the embedded master does not track which trial used which checkpoint",
    "/retain_logs": "logs are kept until their experiment is deleted",
    "/tensorboard-files": "TensorBoard files are deleted with their experiment, not before",
    "/proxy_address": "ports of tasks are not forwarded: the tasks run on this machine",
}


def why_unsupported(path: str) -> str | None:
    """Return why a path of Determined's API is not supported; None for an unknown path."""
    path = path.rstrip("/")
    for ending, why in _UNSUPPORTED_ENDINGS.items():
        if path.endswith(ending):
            return why
    while path:
        if path in _UNSUPPORTED:
            return _UNSUPPORTED[path]
        path = path.rpartition("/")[0]
    return None
