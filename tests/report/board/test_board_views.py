"""The board's markup: which view is asked for, and that what users bring stays text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.board import samples
from tests.report.reading import read
from tests.report.test_run_page import HOSTILE, hostile_run
from zero_trial.errors import ConfigError
from zero_trial.report.board.board_source import Comparison, OutputLine, Overview, OverviewRow, RunsSource, StoreSource
from zero_trial.report.board.board_views import View, address, parse_view, render_view
from zero_trial.report.report_data import Axis, RunReport, Status, SweepReport, Tone


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
    ],
)
def test_a_view_is_read(query: Mapping[str, list[str]], view: View) -> None:
    assert parse_view(query) == view


@pytest.mark.parametrize("query", [{"view": ["secret"]}, {"view": ["run"]}, {"view": ["trial"], "name": ["1", "2"]}])
def test_others_are_refused(query: Mapping[str, list[str]]) -> None:
    with pytest.raises(ConfigError):
        parse_view(query)


class HostileSource:
    """Every text is an attack."""

    unit = "run"

    def version(self) -> object:
        return 1

    def overview(self) -> Overview:
        row = OverviewRow(HOSTILE, HOSTILE, Status(HOSTILE, Tone.BAD), 0.5, HOSTILE, 1.0, HOSTILE, HOSTILE, 0.0)
        return Overview(HOSTILE, HOSTILE, "run", (row,), (HOSTILE,))

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> tuple[SweepReport, list[tuple[str, str]]]:
        from tests.report.test_sweep_page import hostile_sweep

        return hostile_sweep(), [(HOSTILE, HOSTILE), ("a", "b")]

    def run(self, name: str) -> RunReport:
        return hostile_run()

    def experiment_of(self, name: str) -> str | None:
        return HOSTILE

    def compare(self, names: Any) -> Comparison:
        return Comparison({HOSTILE: hostile_run()}, {HOSTILE: {HOSTILE: HOSTILE}}, (Axis(HOSTILE),))

    def log(self, name: str) -> Any:
        return [OutputLine(HOSTILE)]


@pytest.mark.parametrize("kind", ["all", "experiment", "run", "compare"])
def test_hostile_texts_stay_text(kind: str) -> None:
    for section in render_view(HostileSource(), View(kind, ("x",))):
        page = read(str(section.markup()))
        assert page.faults == []
        scripts = [one for one in page.of("script") if one.attributes.get("type") != "application/json"]
        assert (page.of("img"), scripts) == ([], [])
        assert not [name for one in page.elements for name in one.attributes if name.startswith("on")]
        assert all((one.attributes.get("href") or "#").startswith(("#", "data:text/plain")) for one in page.of("a"))


def test_names_in_addresses_are_quoted() -> None:
    assert address("run", "a/b?c#d,e") == "#/run/a%2Fb%3Fc%23d%2Ce"


def test_every_view_of_runs_and_of_a_master(tmp_path: Path) -> None:
    runs, store = RunsSource(samples.runs(tmp_path / "runs")), StoreSource(samples.store(tmp_path / "master"))

    def anchors(source: Any, view: View) -> list[str]:
        sections = render_view(source, view)
        assert all(read(str(section.markup())).faults == [] for section in sections)
        return [section.anchor for section in sections]

    assert anchors(runs, View()) == anchors(store, View()) == ["head", "list"]
    whole = ["head", "summary", "curves", "memory", "checkpoints", "repeat", "log"]
    assert anchors(runs, View("run", ("0001",))) == whole
    assert anchors(store, View("trial", ("5",))) == [*whole[:4], "configuration", "checkpoints", "log"]
    parts = ["head", "summary", "best", "curves", "space", "decisions", "trials"]
    assert anchors(store, View("experiment", ("1",))) == parts
    for source, names in ((runs, ("0001", "0004")), (store, ("5", "6"))):
        assert anchors(source, View("compare", names)) == ["head", "differences", "curves"]
    with pytest.raises(ConfigError):
        render_view(runs, View("compare", tuple(map(str, range(13)))))


def test_nothing_yet_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    sections = render_view(RunsSource(tmp_path / "runs"), View())
    assert [section.anchor for section in sections] == ["head", "empty"]
    assert read(str(sections[1].markup())).of("code")[0].text.startswith("zero-trial run")


def test_the_best_of_a_sweep_is_one_of_its_links(tmp_path: Path) -> None:
    store = StoreSource(samples.store(tmp_path / "master"))
    trials = next(one for one in render_view(store, View("experiment", ("1",))) if one.anchor == "trials")
    page = read(str(trials.markup()))
    report, _ = store.sweep("1", None)
    assert page.of("a")[0].attributes["href"] == f"#/trial/{report.ranked()[0].id}"
    assert len(page.having("pick")) == len(page.of("a")) == 14
    assert replace(report, created="") == replace(store.sweep("1", None)[0], created="")
