"""The board over HTTP: one page without any values in it, and one stream of server-sent events that
fills it.

The page is the same for everyone. Values come from the stream only, which needs the token: the page
takes it from the fragment of its address, which browsers do not send, or asks for it. It sends it
as a header, never as a cookie: cookies of 127.0.0.1 go to every port of this machine.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from zero_trial.board import PATH, board_address
from zero_trial.board.source import BoardSource, Log, RunsSource
from zero_trial.board.views import View, parse_view, render_view
from zero_trial.errors import ConfigError
from zero_trial.master.core.accounts import USER_HEADER
from zero_trial.master.http.messages import (
    AuthLevel,
    BadRequest,
    RequestHead,
    Response,
    Route,
    StreamingResponse,
    Waits,
    encode,
    failure,
    parse_query,
    refuse_foreign,
)
from zero_trial.master.http.server import HttpServer, ReadBody
from zero_trial.report.page import Html, asset, el
from zero_trial.util.text import strip_control

_LOOK_SECONDS = 0.5  # between two looks at the log; every other one is a look at the values
_PACE = 8  # a view that takes a second to make is made again after so many seconds
_MOST_LINES = 2000  # of a log in one event
_LONGEST_LINE = 4000  # characters
_WAITING = 64  # streams at a time of the verb's server
_KEPT_VIEWS = 16  # whose markup is kept


class Board:
    """Answers for one source; many threads call it at once.

    Args:
        login: whether users can log in with name and password; else they need the token.
    """

    def __init__(self, source: BoardSource, *, login: bool) -> None:
        self._source = source
        self._login = login
        self._lock = threading.Lock()
        self._made: dict[View, tuple[object, dict[str, str]]] = {}

    def shell(self) -> Response:
        """Return the page, which has no values in it."""
        return Response(200, _shell(self._login), "text/html; charset=utf-8", headers=_HEADERS)

    def live(self, query: Mapping[str, Sequence[str]], waits: Waits) -> Response | StreamingResponse:
        """Return the stream of one view; with ``once`` only its present state."""
        try:
            view = parse_view(query)
            first = self._sections(view)
            log = self._source.log(view.names[0]) if view.kind in ("trial", "run") else None
        except ConfigError as error:
            return failure(404, str(error))
        once = bool(query.get("once"))
        place = ExitStack()
        if not place.enter_context(waits.one()):
            return failure(503, "too many pages are open already, close some")
        return StreamingResponse(self._events(view, first, log, once), "text/event-stream", place.close)

    def _sections(self, view: View) -> tuple[object, dict[str, str]]:
        """Return the version and markup by anchor; pages of the same view share them."""
        with self._lock:
            version = self._source.version()
            held = self._made.get(view)
            if held is None or held[0] != version:
                made = {section.anchor: str(section.markup()) for section in render_view(self._source, view)}
                held = self._made[view] = version, made
                while len(self._made) > _KEPT_VIEWS:
                    del self._made[next(iter(self._made))]
            return held

    def _events(
        self, view: View, first: tuple[object, dict[str, str]], log: Log | None, once: bool
    ) -> Generator[bytes, None, None]:
        """Yield what is new, as events; empty pieces let the server notice that the reader has
        gone."""
        (version, shown), sent = first, dict[str, str]()
        due = 0.0
        while True:
            fresh = {anchor: html for anchor, html in shown.items() if sent.get(anchor) != html}
            if fresh or shown.keys() != sent.keys():
                yield _event("sections", {"order": list(shown), "fresh": fresh})
            sent = shown
            yield from _log_events(log)
            if once:
                return
            yield b""
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() < due or self._source.version() == version:
                continue
            began = time.monotonic()
            try:
                version, shown = self._sections(view)
            except ConfigError as error:  # deleted meanwhile
                yield _event("gone", {"message": str(error)})
                return
            due = time.monotonic() + max(2 * _LOOK_SECONDS, _PACE * (time.monotonic() - began))


def _log_events(log: Log | None) -> Generator[bytes, None, None]:
    lines = log.new() if log is not None else []
    for start in range(0, len(lines), _MOST_LINES):
        shown = [
            {"t": line.time, "r": line.rank, "l": line.level, "m": strip_control(line.text)[:_LONGEST_LINE]}
            for line in lines[start : start + _MOST_LINES]
        ]
        yield _event("log", {"lines": shown})


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(data))


# The page.

_HEADERS = {"Cache-Control": "no-store", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}


@cache
def _shell(login: bool) -> bytes:
    script = asset("zero_trial.report", "page.js") + asset("zero_trial.board", "board.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the script that is here and no other; styles of elements are part of the drawings
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("title", "zero-trial board"),
        el("link", rel="icon", href="data:,"),
        el("style", Html(asset("zero_trial.report", "page.css") + asset("zero_trial.board", "board.css"))),
    )
    top = el(
        "div",
        el("a", "zero-trial", href="#/", class_="brand"),
        el("nav", aria_label="Where you are", class_="crumbs"),
        el("span", "connecting", class_="link", role="status"),
        class_="top",
    )
    names = [
        el("label", "User", el("input", name="user", autocomplete="username", value="determined")),
        el("label", "Password", el("input", name="password", type="password", autocomplete="current-password")),
    ]
    token = el(
        "label", "Token" if not login else "or a token", el("input", name="token", type="password", autocomplete="off")
    )
    verb = "zero-trial master up" if login else "zero-trial board"
    form = el(
        "form",
        el("h1", "Log in"),
        el("p", f"{verb} prints an address that logs in by itself.", class_="soft"),
        names if login else None,
        token,
        el("p", class_="fault", role="alert", hidden=True),
        el("button", "Log in", type="submit", class_="button"),
        class_="login",
        hidden=True,
    )
    bar = el(
        "div",
        el("span", role="status"),
        el("a", "Compare", class_="button", href="#/"),
        el("button", "Clear", type="button", class_="clear"),
        class_="chosen",
        hidden=True,
    )
    waiting = el("div", [el("span") for _ in range(4)], class_="waiting", aria_label="Loading", role="status")
    body = el("body", top, form, el("main", waiting, aria_live="off"), bar, el("script", Html(script)))
    return (Html("<!DOCTYPE html>\n") + el("html", head, body, lang="en")).encode()


# Under the master, and by itself.


def board_routes(source: BoardSource) -> tuple[Route, ...]:
    """Return the routes with which a master serves the board."""
    board = Board(source, login=True)
    return (
        Route("GET", PATH, lambda request: board.shell(), AuthLevel.PUBLIC),
        Route("GET", f"{PATH}/live", lambda request: board.live(request.query, request.waits)),
    )


def serve_runs(folder: Path, port: int, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Serve the board of a folder of runs until ``stop`` is set; ``ready`` gets its address.

    Raises ConfigError if there is no such folder, ZeroTrialError if the port is taken.
    """
    board = Board(RunsSource(folder), login=False)
    token = secrets.token_urlsafe(24)
    with HttpServer(port=port) as server:
        server.start(_handler(board, token, server.port))
        ready(board_address(server.url, token))
        stop.wait()


def _handler(board: Board, token: str, port: int) -> Callable[[RequestHead, ReadBody], Response | StreamingResponse]:
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
    waits = Waits(_WAITING)

    def answer(head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
        refusal = refuse_foreign(head, hosts)
        if refusal is not None:
            return refusal
        if head.method in ("GET", "HEAD") and head.path.rstrip("/") == PATH:
            return board.shell()
        if not hmac.compare_digest((head.bearer(USER_HEADER) or "").encode(), token.encode()):
            return failure(401, "this needs the token in the address that zero-trial board printed")
        if head.method != "GET" or head.path != f"{PATH}/live":
            return failure(404, f"{head.method} {head.path[:200]} is not known to the board")
        try:
            return board.live(parse_query(head.query_text), waits)
        except BadRequest as error:
            return failure(error.status, str(error))

    return answer
