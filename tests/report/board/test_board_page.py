"""The board in a browser, started once: both widths, dark and light, live values, comparison and
keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.board import samples
from tests.report.board.chromium import Browser
from tests.report.board.conftest import TOKEN, served_runs
from tests.report.browser import needs_browser
from tests.report.test_run_page import HOSTILE
from zero_trial.master.http.messages import RequestHead, Response, StreamingResponse, failure
from zero_trial.master.http.server import HttpServer, ReadBody
from zero_trial.report.board import board_address
from zero_trial.report.board.board_app import Board, _handler
from zero_trial.report.board.board_source import RunsSource

pytestmark = needs_browser

# What sticks out to the right, except from what scrolls by itself.
OUTSIDE = """[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
  .filter((e) => !e.closest(".wide, pre, svg")).map((e) => e.outerHTML.slice(0, 80))"""
# Texts whose contrast with what is behind them is under 4.5 to 1.
PALE = """(() => {
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (e) => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; }
    return [255, 255, 255];
  };
  const says = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && says(e))
    .filter((e) => !e.closest("svg, script, option")).filter((e) => {
      const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05) < 4.5;
    }).map((e) => e.outerHTML.slice(0, 80));
})()"""
# What can be used and has no name.
NAMELESS = """[...document.querySelectorAll("button, a[href], input, select, [tabindex]")].filter((e) => e.checkVisibility())
  .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label"))).map((e) => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def go(browser: Browser, address: str, anchor: str, waits_for: str) -> None:
    """Open a view, from nowhere."""
    browser.open("about:blank")
    browser.open(address)
    browser.wait("document.querySelector('.link.good')")
    browser.ask(f"location.hash = {json.dumps(anchor)}")
    browser.wait(f"document.querySelector({json.dumps(waits_for)})")


@pytest.mark.slow
def test_every_view_at_both_widths_in_the_dark_and_the_light(
    browser: Browser, runs_board: str, master_board: str
) -> None:
    views = (
        (runs_board, "#/", "#list"),
        (runs_board, "#/run/0003", "#log .lines > div"),
        (runs_board, "#/compare/0001,0002", "#differences"),
        (master_board, "#/experiment/1", "#trials"),
        (master_board, "#/trial/5", "#log .lines > div"),
    )
    for address, anchor, there in views:
        for dark in (False, True):
            browser.size(1280, dark=dark)
            go(browser, address, anchor, there)
            for width in (1280, 390):
                browser.size(width, dark=dark)
                assert browser.ask("document.documentElement.scrollWidth") <= width, (anchor, width)
                assert browser.ask(OUTSIDE) == [], (anchor, width)
            assert browser.ask(PALE) == [], (anchor, dark)
            assert browser.ask(NAMELESS) == [], anchor
            assert "token" not in browser.ask("location.href")
    hosts = {address.partition("/board")[0] for address, _, _ in views}
    assert {one for one in browser.requested if not one.startswith((*hosts, "about:", "data:"))} == set()
    assert browser.faults == []


def test_it_lives(browser: Browser, tmp_path: Path) -> None:
    folder = samples.run(tmp_path, "0001", 0.001, steps=200, done=False)
    browser.size(1280)
    with served_runs(tmp_path) as address:
        go(browser, address, "#/run/0001", "#log .lines > div")
        browser.ask(
            """document.querySelector("#repeat details").open = true; document.querySelector(".filter").value = "new"; 1"""
        )
        browser.ask(
            """document.querySelector("#curves .smoothing").value = 0.9; document.querySelector("#curves .plot").focus()"""
        )
        with (folder / "events.jsonl").open("a") as file:
            file.write(samples.as_lines(samples.events(0.001, 300, total=2000)[-11:-1]))
        with (folder / "logs" / "rank-0.log").open("a") as file:
            file.write(f"new {HOSTILE}\nold\n")
        browser.wait("document.querySelector('#summary').textContent.includes('300 of 2000')")
        browser.wait("[...document.querySelectorAll('.lines > div:not([hidden])')].at(-1)?.textContent.includes('new')")
        assert browser.ask("document.querySelector('.lines > div:last-child').hidden") is True  # the filter holds
        # what the reader has set up is as before
        assert browser.ask("document.querySelector('#repeat details').open") is True
        assert browser.ask("document.querySelector('#curves .smoothing').value") == "0.9"
        assert browser.ask("document.activeElement === document.querySelector('#curves .plot')") is True
        assert browser.ask("[document.body.dataset.owned ?? null, document.images.length]") == [None, 0]
        browser.key("ArrowRight")
        assert browser.ask("document.querySelector('#curves .tip').textContent").startswith("step 10")
        samples.run(tmp_path, "0002", 0.002, steps=200, title=HOSTILE)
        browser.ask("location.hash = '#/'")
        browser.wait("document.querySelectorAll('#list tbody tr').length === 2")
        shutil.rmtree(tmp_path / "0002")
        browser.wait("document.querySelectorAll('#list tbody tr').length === 1")
        browser.ask("location.hash = '#/run/0002'")
        browser.wait("document.querySelector('.missing')")
        browser.faults.clear()  # the 404 of what was removed


@pytest.mark.slow
def test_a_full_server_and_streams_that_end(browser: Browser, tmp_path: Path) -> None:
    samples.run(tmp_path, "0001", 0.001, steps=200, done=False)
    mode, asked = ["full"], [0]
    with HttpServer(port=0) as server:
        original = _handler(Board(RunsSource(tmp_path), login=False), TOKEN, server.port)

        def answer(head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
            if "view=run" in head.query_text:
                asked[0] += 1
                if mode[0] == "full":
                    return failure(503, "too many pages")
                if mode[0] == "ends":
                    head = replace(head, query_text=f"{head.query_text}&once=1")
            return original(head, read_body)

        server.start(answer)
        hurry = "const slowly = setTimeout; window.setTimeout = (what, after) => slowly(what, Math.min(after, 50));"
        quick = browser.tell("Page.addScriptToEvaluateOnNewDocument", source=hurry)
        go(browser, board_address(server.url, TOKEN), "#/run/0001", ".missing")
        assert "too many pages" in browser.ask("document.querySelector('.missing').textContent")
        mode[0] = "ends"
        browser.wait("document.querySelector('#log .lines > div')")
        lines = browser.ask("document.querySelectorAll('.lines > div').length")
        assert lines == 22
        until = asked[0] + 3
        while asked[0] < until:
            assert browser.ask("document.querySelector('.missing')") is None
        mode[0] = "full"  # what is shown stays
        browser.wait("document.querySelector('.link').textContent.includes('503')")
        assert browser.ask("document.querySelectorAll('.lines > div').length") == lines
        mode[0] = "stays"
        browser.wait("document.querySelector('.link.good')")
        assert browser.ask("document.querySelectorAll('.lines > div').length") == lines
        browser.tell("Page.removeScriptToEvaluateOnNewDocument", identifier=quick["identifier"])
        browser.open("about:blank")
    browser.faults.clear()  # the 503s


@pytest.mark.slow
def test_it_is_used_by_keys_alone(browser: Browser, runs_board: str) -> None:
    go(browser, runs_board, "#/", "#list")
    chosen = 0
    for _ in range(20):
        browser.key("Tab")
        if chosen < 2 and browser.ask("document.activeElement.matches('.pick')"):
            browser.key(" ")
            chosen += 1
        elif browser.ask("document.activeElement.textContent") == "Compare":
            break
    browser.key("Enter")
    browser.wait("document.querySelector('#differences')")
    assert browser.ask("document.querySelector('main h1').textContent") == "2 compared"
    assert browser.ask("document.querySelectorAll('#curves figure').length") >= 6


@pytest.mark.slow
def test_logging_in(browser: Browser, runs_board: str, master_board: str) -> None:
    for address in (runs_board, master_board):
        page, _, token = address.partition("#token=")
        browser.open("about:blank")
        browser.open(page)
        browser.ask("sessionStorage.clear()")
        browser.open("about:blank")
        browser.open(page)
        browser.wait("document.querySelector('form.login:not([hidden])')")
        for given, then in (
            ("wrong", "!document.querySelector('.login .fault').hidden"),
            (token, "document.querySelector('#list')"),
        ):
            browser.ask(
                f"document.querySelector('form').elements.token.value = {json.dumps(given)}; document.querySelector('form').requestSubmit()"
            )
            browser.wait(then)
    assert token == TOKEN
    browser.faults.clear()  # the 401 of the wrong token
