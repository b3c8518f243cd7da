"""The master over HTTP: what every request passes on its way to its route, and the server.

A request must name the right host, come from no foreign page, have a route, carry a token that permits it, and have a body of an accepted size. The
checks are made in this order, so that only headers are read of a request without a token. Errors become one line of JSON; an unforeseen
exception becomes a 500 and a traceback in the log, and the server goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType

from zero_trial.errors import ZeroTrialError
from zero_trial.master import auth
from zero_trial.master.auth import Principal
from zero_trial.master.core import Master
from zero_trial.master.errors import Conflict, Invalid, NotFound, PermissionDenied, ServiceError, Unsupported
from zero_trial.master.http.request import (
    BadRequest,
    Gone,
    Request,
    RequestHead,
    Waits,
    parse_query,
    split_path,
    whole,
)
from zero_trial.master.http.response import Response, StreamingResponse, failure
from zero_trial.master.http.router import SMALL_BODY, AuthLevel, Route, RouteMatch, Router, why_unsupported
from zero_trial.master.http.routes import checkpoints, experiments, logs, machine, tasks, trials, users
from zero_trial.master.http.server import MAX_CONNECTIONS, HttpServer, ReadBody, Timeouts

log = logging.getLogger(__name__)
_STATUS: dict[type[ServiceError], int] = {NotFound: 404, Conflict: 409, Invalid: 400, Unsupported: 501}
_NAMES = {"allocationId": "allocation_id", "taskId": "task_id", "resourcesId": "resources_id"}
_NUMBERS = {"trialId": "trial_id", "experimentId": "experiment_id"}
_FREE = frozenset({"uuid"})  # the route itself decides whether a checkpoint may be read
_NOBODY = Principal()


class Application:
    """Answers requests to one master; called from many threads at once."""

    def __init__(self, master: Master, router: Router, *, port: int, waits: int) -> None:
        self._master = master
        self._router = router
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._origins = {f"http://{host}" for host in self._hosts}
        self._waits = Waits(waits)
        self._strangers = threading.BoundedSemaphore(4)  # logins at once: checking a password takes 16 MiB
        self._large = threading.BoundedSemaphore(2)  # bodies of many megabytes that are held at once

    def __call__(self, head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
        """Answer one request. Raises Gone if the client has gone, and nothing else."""
        try:
            return self._answer(head, read_body)
        except BadRequest as error:
            return failure(error.status, str(error), close=error.status in (408, 413))
        except PermissionDenied as error:
            return failure(403, error.what)  # clients compare the words of a refused login
        except ServiceError as error:
            return failure(_STATUS.get(type(error), 400), str(error))
        except ZeroTrialError as error:
            log.error("%s %s failed: %s", head.method, head.path, error)
            return failure(500, str(error))
        except Gone:
            raise
        except Exception as error:
            log.exception("%s %s failed", head.method, head.path)
            return failure(500, f"{type(error).__name__} in the master, its log says where")

    def _answer(self, head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
        refusal = self._foreign(head)
        if refusal is not None:
            return refusal
        method = "GET" if head.method == "HEAD" else head.method  # the connection leaves out the body
        found = self._router.find(method, split_path(head.path))
        principal = self._principal(head, found)
        if principal is None:
            return failure(401, "this needs a token: see 'zero-trial master up --env'")
        if found is None:
            log.warning("no route for %s %s (asked by %s)", head.method, head.path[:200], principal.name)
            why = why_unsupported(head.path)
            return (
                failure(501, why)
                if why
                else failure(404, f"{head.method} {head.path[:200]} is not known to the embedded master")
            )
        numbers = {name: whole(found.args[name], name) for name in found.numbers}
        self._scope(found, numbers, principal)
        with self._room(head, found):
            content = read_body(found.route.limit)
            query = parse_query(head.query_text)
            request = Request(self._master, head, found.args, numbers, query, content, principal, self._waits)
            with self._strangers if found.route.level is AuthLevel.ANYBODY and head.method == "POST" else nullcontext():
                return found.route.action(request)

    def _foreign(self, head: RequestHead) -> Response | None:
        """Refuse a request that a web page made a browser send (DNS rebinding, cross-site requests)."""
        if head.headers.get("host", "").lower() not in self._hosts:
            return failure(403, "the Host header does not name this master", close=True)
        origin = head.headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            return failure(403, "requests from other origins are not answered", close=True)
        if head.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return failure(403, "requests from other sites are not answered", close=True)
        return None

    def _principal(self, head: RequestHead, found: RouteMatch | None) -> Principal | None:
        level = found.route.level if found is not None else AuthLevel.BOTH
        if level is AuthLevel.ANYBODY:
            return _NOBODY
        user = head.bearer(auth.USER_HEADER) if level is not AuthLevel.TASK else None
        task = head.bearer(auth.TASK_HEADER)
        principal = self._master.accounts.identify(user, task)
        if principal is not None and principal.allocation is not None and level is AuthLevel.USER:
            raise PermissionDenied("the token of an allocation is not good for this")
        return principal

    def _scope(self, found: RouteMatch, numbers: dict[str, int], principal: Principal) -> None:
        """Refuse an allocation what is not its own: every named part of the path is compared, before the body is read."""
        if principal.allocation is None:
            return
        unknown = found.args.keys() - _NAMES.keys() - _NUMBERS.keys() - _FREE
        if unknown:  # a part that nothing compares stays closed
            raise PermissionDenied(f"the token of an allocation is not good for {', '.join(sorted(unknown))}")
        asked: dict[str, object] = {_NAMES[name]: value for name, value in found.args.items() if name in _NAMES}
        asked |= {_NUMBERS[name]: value for name, value in numbers.items() if name in _NUMBERS}
        auth.require_own(principal.allocation, **asked)

    @contextmanager
    def _room(self, head: RequestHead, found: RouteMatch) -> Iterator[None]:
        """Hold one of the few places for a body of many megabytes while it is read and dealt with."""
        if found.route.limit <= SMALL_BODY or (head.length is not None and head.length <= SMALL_BODY):
            yield
            return
        if not self._large.acquire(timeout=60):
            raise BadRequest(503, "other large requests are being dealt with, try again")
        try:
            yield
        finally:
            self._large.release()


class Server:
    """Serves ``master`` on loopback, in threads of its own, from its construction until ``close``.

    ``port`` 0 takes a free one. Of the connections at most three quarters may wait in long polls and followed logs, so that there is always room for
    questions that are answered at once. Raises ZeroTrialError if the port is taken.
    """

    def __init__(
        self, master: Master, *, port: int = 0, connections: int = MAX_CONNECTIONS, timeouts: Timeouts | None = None
    ) -> None:
        self._http = HttpServer(port=port, limit=connections, timeouts=timeouts)
        self.port = self._http.port
        self.url = self._http.url
        self._http.start(Application(master, Router(all_routes()), port=self.port, waits=max(1, connections * 3 // 4)))

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._http.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def all_routes() -> Iterator[Route]:
    """Yield every route that is answered; their order does not matter."""
    for part in (experiments, trials, checkpoints, logs, tasks, machine, users):
        yield from part.ROUTES
