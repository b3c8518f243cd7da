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
import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

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
from zero_trial.report.board import PATH, board_address
from zero_trial.report.board.board_source import BoardSource, Log, RunsSource
from zero_trial.report.board.board_views import View, parse_view, render_view
from zero_trial.report.page import Html, PageSection, asset, el, page_head
from zero_trial.util.text import strip_control

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between two looks at the log, and at least between two of all pages at the same values
_PACE = 8  # a view that takes a second to make is made again after so many seconds
_LARGEST_SECTION = 16 * 1024 * 1024  # characters of markup
_MOST_LINES = 2000  # of a log in one event
_LONGEST_LINE = 4000  # characters
_WAITING = 64  # streams at a time of the verb's server
_KEPT_VIEWS = 128  # whose markup is kept: more than there are streams at a time


class _Place:
    """One view as all pages that show it get it. One thread at a time makes it, under a lock of its
    own: a view that takes long leaves the others.

    Attributes:
        version: of the source from which it was made.
        shown: markup by anchor, in the order of the page; None until it was made.
        due: when the source is looked at again for it, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.making = threading.Lock()
        self.version: object = None
        self.shown: Mapping[str, str] | None = None
        self.due = 0.0


class Board:
    """Answers for one source; many threads call it at once.

    Args:
        login: whether users can log in with name and password; else they need the token.
    """

    def __init__(self, source: BoardSource, *, login: bool) -> None:
        self._source = source
        self._login = login
        self._mutex = threading.Lock()
        self._places: dict[View, _Place] = {}  # the last that was looked at is the last

    def shell(self) -> Response:
        """Return the page, which has no values in it."""
        return Response(200, _shell(self._login), "text/html; charset=utf-8", headers=_HEADERS)

    def live(self, query: Mapping[str, Sequence[str]], waits: Waits) -> Response | StreamingResponse:
        """Return the stream of one view; with ``once`` only its present state."""
        with ExitStack() as place:
            if not place.enter_context(waits.one()):
                return failure(503, "too many pages are open already, close some")
            try:
                view = parse_view(query)
                shown = self._look(view)
                log = self._source.log(view.names[0]) if view.kind in ("trial", "run") else None
            except ConfigError as error:
                return failure(404, str(error))
            except OSError as error:
                return failure(500, f"this cannot be read: {error}")
            events = self._events(view, shown, log, bool(query.get("once")))
            return StreamingResponse(events, "text/event-stream", place.pop_all().close)

    def _look(self, view: View) -> Mapping[str, str]:
        """Return the markup by anchor, which all pages of the view share: it is made by the first
        that asks after it is due. While another view is made, a page keeps what it has."""
        with self._mutex:
            place = self._places.pop(view) if view in self._places else _Place()
            self._places[view] = place
            while len(self._places) > _KEPT_VIEWS:
                del self._places[next(iter(self._places))]
        held = place.shown
        if held is not None and (time.monotonic() < place.due or not place.making.acquire(blocking=False)):
            return held
        if held is None:
            place.making.acquire()
        try:
            held, began = place.shown, time.monotonic()
            if held is None or began >= place.due:  # not made while this thread waited
                version = self._source.version()  # before reading: what is written meanwhile is read next time
                if held is None or place.version != version:
                    held = self._render(view)
                ended = time.monotonic()
                place.version, place.shown = version, held
                place.due = ended + max(_LOOK_SECONDS, _PACE * (ended - began))
            return held
        finally:
            place.making.release()

    def _render(self, view: View) -> dict[str, str]:
        found = {}
        for section in render_view(self._source, view):
            html = str(section.markup())
            if len(html) > _LARGEST_SECTION:
                words = f"This part has {len(html):,} characters, of which a page shows at most {_LARGEST_SECTION:,}."
                note = el("p", words, " zero-trial report writes all of it to a file.", class_="note")
                html = str(PageSection(section.anchor, section.title, note).markup())
            found[section.anchor] = html
        return found

    def _events(
        self, view: View, shown: Mapping[str, str], log: Log | None, once: bool
    ) -> Generator[bytes, None, None]:
        """Yield what is new, as events; empty pieces let the server notice that the reader has
        gone."""
        sent: Mapping[str, str] = {}
        try:
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
                shown = self._look(view)
        except ConfigError as error:  # deleted meanwhile
            yield _event("gone", {"message": str(error)})
        except OSError as error:  # the page asks again, and gets the reason as an answer
            _log.warning("a page of %s %s ends: %s", view.kind, " ".join(view.names), error)


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
    script = asset("zero_trial.report", "page.js") + asset("zero_trial.report.board", "board.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the script that is here and no other; styles of elements are part of the drawings
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = page_head("zero-trial board", policy, asset("zero_trial.report.board", "board.css"))
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
        except Exception as error:
            _log.exception("%s %s failed", head.method, head.path)
            return failure(500, f"{type(error).__name__} in the board; it has printed the traceback")

    return answer
