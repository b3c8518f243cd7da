"""The board: a live, read-only page of experiments, trials and runs over HTTP: a page without
values, and a stream of server-sent events that fills it.

The page is the same for everyone. Only the stream has values, and it requires the token: the page
reads the token from the fragment of its URL, which browsers do not send, or asks for it. The token
is sent as a header, never as a cookie: cookies of 127.0.0.1 are sent to every local port.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

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
from zero_trial.report import BOARD, board_address, page
from zero_trial.report.page import Child, Html, PageSection, asset, el, join, page_head
from zero_trial.report.plot import Line, line_chart
from zero_trial.report.report_data import (
    OutputLine,
    Overview,
    OverviewRow,
    RunReport,
    Series,
    SweepReport,
    differing_axes,
    format_time,
)
from zero_trial.report.run_page import run_sections
from zero_trial.report.run_reader import RunsSource
from zero_trial.report.sweep_page import sweep_sections
from zero_trial.util.text import format_bytes, format_number, format_value, shorten, strip_control

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # polling interval of the log, and the shortest one of values (shared by all pages)
_PACE = 8  # a view that takes one second to render is rendered again after this many seconds
_MOST_LINES = 2000  # of a log per event
_LONGEST_LINE = 4000  # characters
_WAITING = 64  # concurrent streams of the standalone server
_KEPT_VIEWS = 128  # views with cached markup: more than there are concurrent streams
_MOST_COMPARED = 12  # as many as are distinguishable in one chart
_LONGEST_NAME = 2000  # characters of a requested metric name: URLs are limited


class BoardSource(Protocol):
    """The data of the board: a master's store, or a folder of runs. Raises ConfigError for unknown
    names.

    Attributes:
        unit: the word for one training: ``trial`` or ``run``.
    """

    unit: str

    def version(self) -> object:
        """Return a value that changes when anything changes. Cheap."""

    def overview(self) -> Overview: ...

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> SweepReport: ...

    def run(self, name: str) -> RunReport: ...

    def log(self, name: str) -> Iterator[list[OutputLine]]:
        """Yield the newest lines, then on each call the lines since the last call."""


# Over HTTP.


class _Place:
    """One view, shared by all pages that show it. One thread at a time renders it, under the view's
    own lock, so that a slow view does not block others.

    Attributes:
        version: the version of the source when the view was rendered.
        shown: markup by anchor, in page order.
        due: time of the next check for changes, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.making = threading.Lock()
        self.version: object = None
        self.shown: Mapping[str, str] = {}
        self.due = 0.0


class Board:
    """Serves one source. Thread-safe.

    Args:
        login: whether users can log in with name and password; if not, they need the token.
    """

    def __init__(self, source: BoardSource, *, login: bool) -> None:
        self._source = source
        self._login = login
        self._mutex = threading.Lock()
        self._places: dict[View, _Place] = {}  # in order of last use

    def shell(self) -> Response:
        """Return the page without values."""
        return Response(200, _shell(self._login), "text/html; charset=utf-8", headers=_HEADERS)

    def live(self, query: Mapping[str, Sequence[str]], waits: Waits) -> Response | StreamingResponse:
        """Return the stream of one view; with ``once``, only its current state."""
        with ExitStack() as place:
            if not place.enter_context(waits.one()):
                return failure(503, "too many pages are open, close some of them")
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
        """Return the view's markup by anchor, which all its pages share until the next check."""
        with self._mutex:
            place = self._places.pop(view, None) or _Place()
            self._places[view] = place
            while len(self._places) > _KEPT_VIEWS:
                del self._places[next(iter(self._places))]
        with place.making:
            began = time.monotonic()
            if not place.shown or began >= place.due:
                version = self._source.version()  # before reading, so that later writes are read next time
                if not place.shown or place.version != version:
                    sections = render_view(self._source, view)
                    place.shown = {section.anchor: str(section.markup()) for section in sections}
                    place.version = version
                ended = time.monotonic()
                place.due = ended + max(_LOOK_SECONDS, _PACE * (ended - began))
            return place.shown

    def _events(
        self, view: View, shown: Mapping[str, str], log: Iterator[list[OutputLine]] | None, once: bool
    ) -> Generator[bytes, None, None]:
        """Yield changes as events; empty chunks let the server detect a closed connection."""
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
        except OSError as error:  # the page retries, and gets the reason in the response
            _log.warning("the stream of page %s %s failed: %s", view.kind, " ".join(view.names), error)


def _log_events(log: Iterator[list[OutputLine]] | None) -> Iterator[bytes]:
    lines = next(log) if log is not None else []
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
    script = asset("page.js") + asset("board.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # allows only this script; drawings need inline styles
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = page_head("zero-trial board", policy, asset("board.css"))
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


# Under the master, and alone.


def board_routes(source: BoardSource) -> tuple[Route, ...]:
    """Return the routes for serving the board from a master."""
    board = Board(source, login=True)
    return (
        Route("GET", BOARD, lambda request: board.shell(), AuthLevel.PUBLIC),
        Route("GET", f"{BOARD}/live", lambda request: board.live(request.query, request.waits)),
    )


def serve_runs(folder: Path, port: int, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Serve the board of a folder of runs until ``stop`` is set; call ``ready`` with its URL.

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
        if head.method in ("GET", "HEAD") and head.path.rstrip("/") == BOARD:
            return board.shell()
        if not hmac.compare_digest((head.bearer(USER_HEADER) or "").encode(), token.encode()):
            return failure(401, "this page needs the token in the address that zero-trial board printed")
        if head.method != "GET" or head.path != f"{BOARD}/live":
            return failure(404, f"the board has no route for {head.method} {head.path[:200]}")
        try:
            return board.live(parse_query(head.query_text), waits)
        except BadRequest as error:
            return failure(error.status, str(error))
        except Exception as error:
            _log.exception("%s %s failed", head.method, head.path)
            return failure(500, f"{type(error).__name__} in the board; its output has the traceback")

    return answer


# What a view is made of.


@dataclass(frozen=True)
class View:
    """The view that a page of the board requests.

    Args:
        kind: ``all``, ``experiment``, ``trial`` (without a master: ``run``), or ``compare``.
        drawn: group and name of the metric in an experiment's curves.
    """

    kind: str = "all"
    names: tuple[str, ...] = ()
    drawn: tuple[str, str] | None = None


def parse_view(query: Mapping[str, Sequence[str]]) -> View:
    """Return the view of a query string. Raises ConfigError if there is no such view."""
    kind = (query.get("view") or ["all"])[0]
    names = tuple(dict.fromkeys(query.get("name") or ()))
    one = kind in ("experiment", "trial", "run")
    if (not one and kind not in ("all", "compare")) or (one and len(names) != 1):
        raise ConfigError("unknown view", where="view", got=kind[:80])
    group, _, metric = (query.get("metric") or [""])[0].partition(" ")
    return View(kind, names, (group, metric) if metric else None)


def render_view(source: BoardSource, view: View) -> list[PageSection]:
    """Return the sections of a view, heading first, without empty ones.

    Raises ConfigError if the source does not have the requested item.
    """
    if view.kind == "all":
        found = _overview(source.overview())
    elif view.kind == "experiment":
        report = source.sweep(view.names[0], view.drawn)
        head = page.heading(report.title, report.status, report.subtitle)
        # a trial's link, after the checkbox for a comparison
        sections = sweep_sections(
            report,
            lambda name: [_box(name, f"choose {source.unit} {name}"), el("a", name, href=address(source.unit, name))],
        )
        drawn = view.drawn or ("validation", report.metric)
        found = [PageSection("head", "", head), *_with_metric_choice(sections, report.metrics, drawn)]
    elif view.kind in ("trial", "run"):
        run = source.run(view.names[0])
        above = run.experiment
        back = el("a", f"experiment {above}", href=address("experiment", above), class_="above") if above else None
        head = join([page.heading(run.title, run.status, run.subtitle), back])
        found = [PageSection("head", "", head), *run_sections(run), _LOG]
    else:
        found = _comparison(source, view.names)
    shown = [section for section in found if section.content]
    titled = [section for section in shown if section.title]
    if len(titled) > 2:
        jumps = [el("button", section.title, type="button", data_to=section.anchor) for section in titled]
        shown[0] = PageSection("head", "", [shown[0].content, el("nav", jumps, class_="jumps", aria_label="Sections")])
    return shown


def address(kind: str, name: str) -> str:
    """Return the URL of a view."""
    return f"#/{kind}/{quote(name, safe='')}"


def _box(name: str, said: str) -> Html:
    return el("input", type="checkbox", class_="pick", data_name=name, aria_label=said)


def _with_metric_choice(
    sections: Sequence[PageSection], names: Sequence[tuple[str, str]], drawn: tuple[str, str]
) -> list[PageSection]:
    """Add a metric selector before the curves of all trials."""
    if len(names) < 2:
        return list(sections)
    options = [
        el("option", f"{shorten(name)} ({group})", value=f"{group} {name}", selected=(group, name) == drawn)
        for group, name in names
        if len(name) <= _LONGEST_NAME
    ]
    choice = el("p", el("label", "Metric ", el("select", options, class_="metric")), class_="choice")
    return [
        PageSection(one.anchor, one.title, [choice, one.content or el("p", "No values yet.", class_="soft")])
        if one.anchor == "curves"
        else one
        for one in sections
    ]


# All experiments, or all runs.


def _overview(found: Overview) -> list[PageSection]:
    noun = found.noun
    busy = sum(row.status.tone.value == "busy" for row in found.rows)
    counted = f"{len(found.rows)} {noun}{'s' if len(found.rows) != 1 else ''}"
    head = el("header", el("h1", found.title), el("p", f"{counted}, {busy} under way · {found.subtitle}"))
    if not found.rows:
        empty: Child = [
            el("h2", f"No {noun} yet"),
            el("p", "Start one, and it appears here automatically:"),
            page.command(found.begin),
        ]
        return [PageSection("head", "", head), PageSection("empty", "", empty)]
    return [PageSection("head", "", head), PageSection("list", "", _table(found))]


def _table(found: Overview) -> Html:
    columns = [found.noun, "state", "progress", "best" if found.noun == "experiment" else "last"]
    trials = any(row.trials for row in found.rows)
    steps = any(row.steps for row in found.rows)
    columns += [*(["trials"] if trials else []), *(["steps"] if steps else []), "started"]
    numeric = ("trials", "steps", "started")
    rows = [_overview_row(found.noun, row, trials, steps) for row in found.rows]
    heads = [(name, "num" if name in numeric else None) for name in columns]
    return page.table(heads, rows, class_="cards list", aria_label=found.title)


def _overview_row(noun: str, row: OverviewRow, trials: bool, steps: bool) -> Html:
    best = (
        [el("b", format_number(row.best)), " ", el("span", row.metric, class_="soft")] if row.best is not None else None
    )
    return el(
        "tr",
        el(
            "th",
            _box(row.name, f"choose run {row.name}") if noun == "run" else None,
            el("a", row.name, el("span", row.title, class_="title"), href=address(noun, row.name)),
            scope="row",
        ),
        el("td", page.state(row.status)),
        el("td", _progress(row.done)),
        el("td", best, data_label="best" if noun == "experiment" else "last"),
        el("td", row.trials, class_="num", data_label="trials") if trials else None,
        el("td", row.steps, class_="num", data_label="steps") if steps else None,
        el("td", format_time(row.started) if row.started is not None else "", class_="num soft"),
        data_key=row.name,
    )


def _progress(done: float | None) -> Child:
    if done is None:
        return None
    share = min(max(done, 0.0), 1.0)
    percent = f"{100 * share:.0f} %"
    return [
        el("span", el("i", style=f"--w:{share:.4g}"), class_="meter", role="img", aria_label=percent),
        el("span", percent, class_="percent"),
    ]


# The log: its lines are streamed separately, as text.

_LOG = PageSection(
    "log",
    "Log",
    [
        el(
            "p",
            el("label", "Only lines with ", el("input", type="search", class_="filter", autocomplete="off")),
            el("label", el("input", type="checkbox", class_="follow", checked=True), " follow"),
            class_="choice",
        ),
        el("pre", class_="lines", tabindex=0, role="log", aria_label="Log", aria_live="off"),
        el("p", "Nothing was written yet.", class_="soft silent"),
    ],
)

# Selected trials or runs in the same charts.


def _comparison(source: BoardSource, names: Sequence[str]) -> list[PageSection]:
    if not 1 <= len(names) <= _MOST_COMPARED:
        raise ConfigError("too many runs to compare", where="name", got=len(names), expected=f"1 to {_MOST_COMPARED}")
    reports = {name: source.run(name) for name in names}
    links = [[" · " if at else None, el("a", name, href=address(source.unit, name))] for at, name in enumerate(names)]
    return [
        PageSection("head", "", el("header", el("h1", f"{len(names)} compared"), el("p", links))),
        PageSection("differences", "Differences", _differences(reports, source.unit)),
        PageSection("curves", "Curves", _overlays(reports)),
    ]


def _overlays(reports: Mapping[str, RunReport]) -> Child:
    """Return a chart per metric with a line per run that has it."""
    curves = {name: _curves(report) for name, report in reports.items()}
    metrics = dict.fromkeys(metric for own in curves.values() for metric in own)
    roles = {name: f"c{at}" for at, name in enumerate(curves)}
    charts = []
    for metric in metrics:
        lines = [Line(own[metric], roles[name], name) for name, own in curves.items() if metric in own]
        charts.append(line_chart(metric, lines))
    return [charts[:1], el("div", charts[1:], class_="charts overlays") if charts[1:] else None] if charts else None


def _curves(report: RunReport) -> dict[str, Series]:
    training = {f"training {report.training.name}": report.training} if report.training is not None else {}
    return {**training, **{one.name: one for one in (*report.validation, *report.progress) if len(one)}}


def _differences(reports: Mapping[str, RunReport], unit: str) -> Child:
    """Return a row per run: state, metrics, memory and the values that differ between runs."""
    metrics = dict.fromkeys(change.name for report in reports.values() for change in report.changes)
    points = {name: report.point() for name, report in reports.items()}
    axes = differing_axes(list(points.values()))
    names = [
        "",
        "state",
        *(f"last {shorten(metric)}" for metric in metrics),
        "planned",
        "measured",
        *(axis.name.rpartition(".")[2] for axis in axes),
    ]
    heads = [(page.breakable(name), "num" if at > 1 else None) for at, name in enumerate(names)]
    rows = []
    for at, (name, report) in enumerate(reports.items()):
        after = {change.name: change.after for change in report.changes}
        key = el("i", class_=f"key c{at}", aria_hidden="true")
        values = [points[name].get(axis.name) for axis in axes]
        rows.append(
            el(
                "tr",
                el("th", key, el("a", name, href=address(unit, name)), scope="row"),
                el("td", page.state(report.status)),
                [el("td", format_number(after.get(metric)), class_="num") for metric in metrics],
                [
                    el("td", format_bytes(bytes_), class_="num")
                    for bytes_ in (report.memory.planned, report.memory.measured)
                ],
                [
                    el("td", format_number(value) if isinstance(value, float) else format_value(value), class_="num")
                    for value in values
                ],
                data_key=name,
            )
        )
    return page.scrolling(page.table(heads, rows, class_="compared"), "Differences")
