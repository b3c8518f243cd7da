"""The reports and the board in a browser, started once: both widths, dark and light, pointers and
keys, live values."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report import samples
from tests.report.browser import Browser, needs_browser
from tests.report.conftest import TOKEN, served_runs
from tests.report.samples import HOSTILE
from zero_trial.master.http.messages import RequestHead, Response, StreamingResponse, failure
from zero_trial.master.http.server import HttpServer, ReadBody
from zero_trial.report import board_address
from zero_trial.report.board import Board, _handler
from zero_trial.report.report_data import RunReport, SweepReport
from zero_trial.report.run_page import render_run
from zero_trial.report.run_reader import RunsSource
from zero_trial.report.sweep_page import render_sweep

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


def go(browser: Browser, address: str, anchor: str, waits_for: str) -> None:
    """Open a view, from nowhere."""
    browser.open("about:blank")
    browser.open(address)
    browser.wait("document.querySelector('.link.good')")
    browser.ask(f"location.hash = {json.dumps(anchor)}")
    browser.wait(f"document.querySelector({json.dumps(waits_for)})")


def shown(browser: Browser, folder: Path, html: str) -> None:
    """Open a report."""
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    browser.open(path.as_uri())
    browser.wait("document.readyState === 'complete' && document.querySelector('main')")


def fits(browser: Browser, width: int, *, dark: bool = False) -> None:
    """What is shown is not wider than the window, and can be read and named."""
    browser.size(width, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(OUTSIDE) == browser.ask(PALE) == browser.ask(NAMELESS) == []


ALL = (
    "const all = (selector) => [...document.querySelectorAll(selector)], section = (id) => document.getElementById(id);"
)
KEY = "const key = (element, key) => element.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));"


def asked(browser: Browser, script: str) -> Any:
    """Return what the script returns."""
    return browser.ask(f"(() => {{ {ALL} {KEY} {script} }})()")


def test_the_report_of_a_run(browser: Browser, tmp_path: Path, run: RunReport) -> None:
    shown(browser, tmp_path, render_run(run))
    for width, dark in ((390, True), (1280, False)):
        fits(browser, width, dark=dark)
    script = """
      const plot = all(".plot")[0], box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true }));
      const tip = all(".tip")[0].textContent;
      key(plot, "Escape");
      const hidden = all(".tip").length;
      key(plot, "ArrowRight");
      const first = all(".tip")[0].textContent;
      const before = all("[data-line='0']")[0].getAttribute("d");
      const slider = all(".smoothing")[0];
      slider.value = 0.9;
      slider.dispatchEvent(new Event("input"));
      const after = all("[data-line='0']")[0].getAttribute("d");
      return { tip, hidden, first, smoothing: before !== after, loads: performance.getEntriesByType("resource").length };
    """
    found = asked(browser, script)
    assert found["tip"].startswith("step 1000") and "validation_loss" in found["tip"]
    assert found["first"].startswith("step 10")
    assert (found["hidden"], found["smoothing"], found["loads"]) == (0, True, 0)


def test_the_report_of_a_sweep(browser: Browser, tmp_path: Path, sweep: SweepReport) -> None:
    shown(browser, tmp_path, render_sweep(sweep))
    for width, dark in ((390, True), (1280, False)):
        fits(browser, width, dark=dark)
    script = """
      const row = section("trials").querySelector("tbody tr");
      row.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
      const lit = all(".lit").map((e) => e.tagName.toLowerCase()).sort().join(" ");
      const named = all(".lit-name")[0].textContent;
      row.dispatchEvent(new PointerEvent("pointerout", { bubbles: true }));
      const after = all(".lit").length;
      const plot = section("curves").querySelector(".plot");
      const best = plot.querySelector("path.line.best"), ctm = plot.querySelector("svg").getScreenCTM();
      const [x, y] = best.getAttribute("d").slice(1).split("L")[1].split(" ").map(Number);
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX: x * ctm.a + ctm.e, clientY: y * ctm.d + ctm.f, bubbles: true }));
      const pointed = all("tr.lit").map((e) => e.dataset.trial);
      const handle = all(".handle[data-axis='2'][data-end='low']")[0];
      for (let times = 0; times < 10; times += 1) key(handle, "ArrowUp");
      const kept = all(".heard")[0].textContent, out = all("#trials tr.out").length;
      all(".clear")[0].click();
      const cleared = all("tr.out").length;
      const first = () => Number(section("trials").querySelector("tbody tr").dataset.trial);
      const sort = all("#trials thead button").find((e) => e.textContent === "memory planned");
      sort.click(); const least = first(); sort.click(); const most = first();
      return { lit, named, after, pointed, kept, out, cleared, least, most };
    """
    found = asked(browser, script)
    best = sweep.ranked()[0].id
    assert "path" in found["lit"] and "tr" in found["lit"] and "button" in found["lit"]
    assert found["named"].startswith(f"trial {best}: best validation_loss ")
    assert set(found["pointed"]) == {best}
    assert 0 < found["out"] < 14 and found["kept"] == f"{14 - found['out']} of 14 trials"
    assert (found["after"], found["cleared"], found["least"], found["most"]) == (0, 0, 3, 16)


@pytest.mark.slow
def test_every_view_of_the_board(browser: Browser, runs_board: str, master_board: str) -> None:
    views = (
        (runs_board, "#/", "#list"),
        (runs_board, "#/run/0003", "#log .lines > div"),
        (runs_board, "#/compare/0001,0002", "#differences"),
        (master_board, "#/experiment/1", "#trials"),
        (master_board, "#/trial/5", "#log .lines > div"),
    )
    browser.requested.clear()
    for at, (address, anchor, there) in enumerate(views):
        go(browser, address, anchor, there)
        for width in (1280, 390):
            fits(browser, width, dark=(width == 390) == at % 2)
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
