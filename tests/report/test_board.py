"""The board: who gets in over HTTP, what the stream carries, and that users' texts stay text."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.report import samples
from tests.report.conftest import served_runs
from tests.report.reading import read
from tests.report.samples import HOSTILE, hostile_run, hostile_sweep
from zero_trial.errors import ConfigError
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.http.messages import Response, StreamingResponse, Waits
from zero_trial.report.board import Board, BoardSource, View, parse_view, render_view
from zero_trial.report.board import address as address_of
from zero_trial.report.master_reader import StoreSource
from zero_trial.report.report_data import OutputLine, Overview, OverviewRow, RunReport, SweepReport
from zero_trial.report.run_reader import RunsSource

# Which view is asked for, and its markup.


@pytest.mark.parametrize(
    ("query", "view"),
    [
        ({}, View()),
        ({"view": ["run"], "name": ["0001"]}, View("run", ("0001",))),
        (
            {"view": ["experiment"], "name": ["3"], "metric": ["training a b"]},
            View("experiment", ("3",), ("training", "a b")),
        ),
        ({"view": ["compare"], "name": ["1", "2", "1"]}, View("compare", ("1", "2"))),
        ({"view": ["secret"]}, None),
        ({"view": ["run"]}, None),
        ({"view": ["trial"], "name": ["1", "2"]}, None),
    ],
)
def test_a_view_is_read_or_refused(query: Mapping[str, list[str]], view: View | None) -> None:
    if view is not None:
        assert parse_view(query) == view
    else:
        with pytest.raises(ConfigError):
            parse_view(query)


class HostileSource:
    """Every text is an attack."""

    unit = "run"

    def __init__(self, run: RunReport, sweep: SweepReport) -> None:
        self._run, self._sweep = hostile_run(run), hostile_sweep(sweep)

    def version(self) -> object:
        return 1

    def overview(self) -> Overview:
        row = OverviewRow(HOSTILE, HOSTILE, samples.HOSTILE_STATUS, 0.5, HOSTILE, 1.0, HOSTILE, HOSTILE, 0.0)
        return Overview(HOSTILE, HOSTILE, "run", (row,), HOSTILE)

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> SweepReport:
        return self._sweep

    def run(self, name: str) -> RunReport:
        return self._run

    def log(self, name: str) -> Iterator[list[OutputLine]]:
        yield [OutputLine(HOSTILE)]


@pytest.mark.parametrize("kind", ["all", "experiment", "run", "compare"])
def test_hostile_texts_stay_text(kind: str, run: RunReport, sweep: SweepReport) -> None:
    for section in render_view(HostileSource(run, sweep), View(kind, ("x", HOSTILE))):
        page = read(str(section.markup()))
        assert page.faults == []
        scripts = [one for one in page.of("script") if one.attributes.get("type") != "application/json"]
        assert (page.of("img"), scripts) == ([], [])
        assert not [name for one in page.elements for name in one.attributes if name.startswith("on")]
        assert all((one.attributes.get("href") or "#").startswith(("#", "data:text/plain")) for one in page.of("a"))
    assert address_of("run", "a/b?c#d,e") == "#/run/a%2Fb%3Fc%23d%2Ce"


def test_every_view_of_runs_and_of_a_master(runs: Path, store: MasterDirectory, tmp_path: Path) -> None:
    def shown(source: BoardSource, view: View) -> dict[str, str]:
        sections = {section.anchor: str(section.markup()) for section in render_view(source, view)}
        assert all(read(html).faults == [] for html in sections.values())
        return sections

    of_runs, of_store, of_none = RunsSource(runs), StoreSource(store), RunsSource(tmp_path)
    assert [*shown(of_runs, View())] == [*shown(of_store, View())] == ["head", "list"]
    whole = ["head", "summary", "curves", "memory", "configuration", "checkpoints", "repeat", "log"]
    assert [*shown(of_runs, View("run", ("0001",)))] == whole
    trial = shown(of_store, View("trial", ("5",)))
    assert [*trial] == [name for name in whole if name != "repeat"]
    assert "#/experiment/1" in [one.attributes.get("href") for one in read(trial["head"]).of("a")]
    experiment = shown(of_store, View("experiment", ("1",)))
    assert [*experiment] == ["head", "summary", "best", "curves", "space", "decisions", "trials"]
    trials = read(experiment["trials"])
    assert trials.of("a")[0].attributes["href"] == f"#/trial/{of_store.sweep('1', None).ranked()[0].id}"
    assert len(trials.having("pick")) == len(trials.of("a")) == 14
    compared = shown(of_runs, View("compare", ("0001", "0002")))
    assert [*compared] == ["head", "differences", "curves"]
    assert [one.text for one in read(compared["differences"]).of("th")][6:8] == ["lr", "stage"]
    assert [*shown(of_store, View("compare", ("5", "6")))] == ["head", "differences", "curves"]
    with pytest.raises(ConfigError):
        render_view(of_runs, View("compare", tuple(map(str, range(13)))))
    empty = shown(of_none, View())
    assert [*empty] == ["head", "empty"]
    assert read(empty["empty"]).of("code")[0].text.startswith("zero-trial run")


# Over HTTP.


def place(url: str) -> tuple[str, str]:
    """Host with port, and token."""
    parts = urlsplit(url)
    return parts.netloc, parts.fragment.removeprefix("token=")


def get(url: str, path: str, *, token: str = "", method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(place(url)[0], timeout=30)
    sent = {**({"Authorization": f"Bearer {token}"} if token else {}), **headers}
    connection.request(method, path, headers=sent)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in body.decode().split("\n\n"):
        if block:
            name, data = (line.partition(": ")[2] for line in block.split("\n"))
            found.append((name, json.loads(data)))
    return found


PATHS = ("/board/live", "/board/live?view=run&name=0001", "/board/x", "/", "/runs/0001/events.jsonl")


def test_who_gets_in(runs_board: str, master_board: str) -> None:
    """No path answers without its token, nor to a foreign page; names that lead elsewhere are not
    there; and a board can only be read."""
    for address in (runs_board, master_board):
        for path, token in itertools.product(PATHS, ("", "wrong", "user-token2")):
            status, body, _ = get(address, path, token=token)
            assert status == 401, path
            assert b"quickstart" not in body and b"learning rates" not in body
        token = place(address)[1]
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert get(address, "/board/live?once=1", token=token, **headers)[0] == 403
            assert get(address, "/board", **headers)[0] == 403
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert get(address, "/board/live", method=method, token=token)[0] == 404
        for view, name in itertools.product(("run", "trial", "experiment", "compare"), ("../0001", "/etc", "%2e%2e")):
            path = f"/board/live?once=1&view={view}&name={quote(name, safe='')}"
            assert get(address, path, token=token)[0] == 404, path
    headers = {"Grpc-Metadata-x-allocation-token": "Bearer user-token"}  # of a trial
    assert get(master_board, "/board/live?once=1", **headers)[0] == 401


def test_the_page_itself_has_no_values_and_is_one_file(runs_board: str, master_board: str) -> None:
    for address in (runs_board, master_board):
        assert get(address, "/board/")[1] == get(address, "/board")[1]
        status, body, headers = get(address, "/board")
        assert (status, headers["X-Frame-Options"], headers["Cache-Control"]) == (200, "DENY", "no-store")
        assert b"quickstart" not in body and b"learning rates" not in body and place(address)[1].encode() not in body
        assert b" src=" not in body and b"@import" not in body and b"url(" not in body


def test_one_look_at_each_view(runs_board: str, master_board: str) -> None:
    for address, query in (
        (runs_board, ""),
        (runs_board, "&view=run&name=0004"),
        (master_board, "&view=experiment&name=1&metric=training%20loss"),
        (master_board, "&view=trial&name=5"),
    ):
        status, body, headers = get(address, f"/board/live?once=1{query}", token=place(address)[1])
        assert (status, headers["Content-Type"]) == (200, "text/event-stream")
        name, data = events(body)[0]
        assert name == "sections" and data["order"] == list(data["fresh"])
        assert [name for name, _ in events(body)[1:]] == (["log"] if "name=0004" in query or "trial" in query else [])


def stream(url: str, query: str) -> tuple[socket.socket, Iterator[tuple[str, dict[str, Any]]]]:
    """An open stream and its events as they come."""
    host, token = place(url)
    connection = socket.create_connection((host.partition(":")[0], int(host.partition(":")[2])), timeout=30)
    connection.sendall(
        f"GET /board/live?{query} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )

    def coming() -> Iterator[tuple[str, dict[str, Any]]]:
        with connection.makefile("rb") as file:
            while file.readline() != b"\r\n":
                pass
            while size := int(file.readline(), 16):
                block = file.read(size + 2)
                yield from events(block[:-2])

    return connection, coming()


def test_what_comes_is_sent_and_only_what_has_changed(tmp_path: Path) -> None:
    folder = samples.run(tmp_path, "0001", 0.001, steps=200, done=False)
    with served_runs(tmp_path) as address:
        connection, coming = stream(address, "view=run&name=0001")
        with connection:
            found = [next(coming) for _ in range(2)]
            assert [name for name, _ in found] == ["sections", "log"]
            with (folder / "events.jsonl").open("a") as file:
                file.write(samples.as_lines(samples.events(0.001, 300, total=2000)[-11:-1]))
            name, data = next(coming)
            assert name == "sections" and {"summary", "curves"} <= data["fresh"].keys()
            assert not {"memory", "log", "repeat"} & data["fresh"].keys()
            with (folder / "logs" / "rank-0.log").open("a") as file:
                file.write("<b>bold</b> \x1b[31mred\n")
            name, data = next(coming)
            assert name == "log" and [line["m"] for line in data["lines"]] == ["<b>bold</b> red"]


def test_streams_have_a_limit_and_give_their_places_back(tmp_path: Path) -> None:
    board, waits = Board(RunsSource(samples.runs(tmp_path / "runs")), login=False), Waits(1)
    first = board.live({}, waits)
    assert isinstance(first, StreamingResponse)
    refused = board.live({}, waits)
    assert isinstance(refused, Response) and refused.status == 503
    next(first.pieces)
    first.close()
    assert isinstance(board.live({}, waits), StreamingResponse)


class Clock:
    """Time that passes only where it is slept or worked."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self.now += seconds
        else:  # another test's page that is still served
            time.sleep(seconds)


class Busy(RunsSource):
    """Runs that always change, and take a second to read."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder)
        self.clock, self.made = clock, 0

    def version(self) -> object:
        return self.made, self.clock.now

    def overview(self) -> Any:
        self.made += 1
        self.clock.sleep(1.0)
        return super().overview()


def test_pages_of_one_view_share_its_makings_while_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("zero_trial.report.board.time", clock)
    source = Busy(samples.runs(tmp_path / "runs"), clock)
    board, waits = Board(source, login=False), Waits(9)
    began = clock.now
    opened = [board.live({}, waits) for _ in range(5)]
    for _ in range(20):
        for answer in opened:
            assert isinstance(answer, StreamingResponse)
            while next(answer.pieces):
                pass
    passed = clock.now - began
    assert passed > 40
    assert passed / 10 < source.made <= 1 + passed / 9  # a second of every nine, for all of them
    for answer in opened:
        assert isinstance(answer, StreamingResponse)
        answer.close()


def test_a_page_goes_on_while_another_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_trial.report.board._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("zero_trial.report.board._PACE", 0)
    inside, ends = threading.Event(), threading.Event()

    class Slow(RunsSource):
        def overview(self) -> Any:
            inside.set()
            assert ends.wait(30)
            return super().overview()

    folder = samples.runs(tmp_path / "runs")
    board, waits = Board(Slow(folder), login=False), Waits(9)
    page = board.live({"view": ["run"], "name": ["0001"]}, waits)
    assert isinstance(page, StreamingResponse)
    while next(page.pieces):  # up to the pause
        pass
    slow = threading.Thread(target=board.live, args=({}, waits))
    slow.start()
    assert inside.wait(30)
    (folder / "0001" / "events.jsonl").touch()
    going = threading.Thread(target=next, args=(page.pieces,))
    first = threading.Thread(target=board.live, args=({"view": ["run"], "name": ["0002"]}, waits))
    for thread in (going, first):
        thread.start()
    for thread in (going, first):
        thread.join(60)
    stuck = going.is_alive() or first.is_alive()
    ends.set()
    for thread in (slow, going, first):
        thread.join(30)
    assert not stuck


def test_what_cannot_be_read_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = samples.runs(tmp_path / "runs")
    with served_runs(folder) as address:
        token = place(address)[1]
        (folder / "0001" / "events.jsonl").unlink()
        (folder / "0001" / "events.jsonl").mkdir()
        status, body, _ = get(address, "/board/live?once=1&view=run&name=0001", token=token)
        assert status == 200 and b"Not on this page: events.jsonl: not a regular file" in body
        assert get(address, "/board/live?once=1", token=token)[0] == 200
        monkeypatch.setattr(RunsSource, "overview", lambda source: 1 // 0)
        (folder / "0002" / "events.jsonl").touch()
        end = time.monotonic() + 20.0
        while True:  # what was made is shared for half a second after it was made
            status, body, _ = get(address, "/board/live?once=1", token=token)
            if status == 500 or time.monotonic() > end:
                break
            time.sleep(0.1)
        assert status == 500 and b"ZeroDivisionError" in body


def test_a_log_that_cannot_be_read_is_a_line_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_trial.report.board._LOOK_SECONDS", 0.0)
    folder = samples.runs(tmp_path / "runs")
    answer = Board(RunsSource(folder), login=False).live({"view": ["run"], "name": ["0001"]}, Waits(9))
    assert isinstance(answer, StreamingResponse)
    while next(answer.pieces):
        pass
    (folder / "0001" / "logs" / "rank-0.log").unlink()
    (folder / "0001" / "logs" / "rank-0.log").mkdir()
    assert b"rank-0.log cannot be read: not a regular file" in next(answer.pieces)
    assert next(answer.pieces) == b"" == next(answer.pieces)  # reported once, and the stream goes on
    answer.close()


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    long = "name " * 50_000
    run = samples.run(tmp_path, "0001", 0.001, steps=200)
    more = [{**event, long: 1.0, "each": {long: [1.0, 2.0]}} for event in samples.events(0.001, 200)]
    (run / "events.jsonl").write_text(samples.as_lines(more))
    found = "".join(str(section.markup()) for section in render_view(RunsSource(tmp_path), View("run", ("0001",))))
    assert "name name name" in found and "…" in found and len(found) < 300_000
