"""Pages without a browser: escaping, scales, charts, and that a report is whole on its page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.reading import Element, Page, read
from tests.report.samples import HOSTILE, hostile_run, hostile_sweep
from zero_trial.report import page
from zero_trial.report.page import Html, PageSection, breakable, el, join, json_data, memory_view
from zero_trial.report.plot import Line, Scale, fit, fit_axis, line_chart, smoothed
from zero_trial.report.report_data import (
    Axis,
    BracketHistory,
    Memory,
    RungDecision,
    RungOutcome,
    RunReport,
    Series,
    Status,
    SweepReport,
    Tone,
)
from zero_trial.report.run_page import render_run
from zero_trial.report.sweep_page import brackets_view, parallel_view, render_sweep

# Markup.


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (el("p", "a < b & c", el("b", "x")), "<p>a &lt; b &amp; c<b>x</b></p>"),
        (
            el("td", class_="num", data_label='"quoted" <b>', hidden=True, title=None, open=False),
            '<td class="num" data-label="&quot;quoted&quot; &lt;b&gt;" hidden></td>',
        ),
        (el("wbr"), "<wbr>"),
        (join(["a", None, [1, (Html("<i></i>"), False)], 0]), "a1<i></i>0"),
        (join("a\x00\x1b[31mb\nc\ud800"), "a\u2400\u241b[31mb\nc?"),
        (breakable("zero.max_<b>"), "zero.<wbr>max_<wbr>&lt;b&gt;<wbr>"),
        (page.state(Status("failed", Tone.BAD)), '<span class="state bad">failed</span>'),
    ],
)
def test_text_is_escaped_and_markup_is_not(made: str, expected: str) -> None:
    assert made == expected


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--<script>", "&lt;", "\u2028"])
def test_json_cannot_leave_its_script_element(text: str) -> None:
    made = json_data({"name": text})
    body = made.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert not set("<>&\u2028") & set(body)
    assert json.loads(body) == {"name": text}


@given(st.text())
def test_any_text_comes_back_as_text(text: str) -> None:
    found = read(el("p", text, title=text))
    assert found.faults == []
    assert [element.tag for element in found.elements] == ["p"]


def test_sections_without_content_are_left_out_and_three_make_a_navigation() -> None:
    head = page.heading("title", Status("done", Tone.GOOD), "")
    sections = [PageSection(name, name, content) for name, content in (("a", "1"), ("b", None), ("c", "2"), ("d", "3"))]
    html = page.document("t", head, sections, "today")
    found = read(html)
    assert found.faults == [] and "on today" in found.text
    assert [section.attributes["id"] for section in found.of("section")] == ["a", "c", "d"]
    assert [element.attributes["href"] for element in found.of("a")] == ["#a", "#c", "#d"]
    assert html.count("</style>") == html.count("</script>") == 1  # they cannot end their own elements
    assert read(page.document("t", head, sections[:3], "")).of("nav") == []


# Scales.


@pytest.mark.parametrize(
    ("scale", "value", "place"),
    [
        (Scale(0, 10), 2.5, 0.25),
        (Scale(0, 10), 11, 1.0),
        (Scale(1e-4, 1.0, log=True), 1e-2, 0.5),
        (Scale(1e-4, 1.0, log=True), 0, None),
        (Scale(choices=("0", "1", "2")), 1, 0.5),
        (Scale(choices=("0", "1", "2")), 7, None),
        (Scale(choices=("one",)), "one", 0.5),
        *((Scale(), value, None) for value in (None, True, "x", math.nan, math.inf)),
        *((fit([value, value]), value, 0.5) for value in (4e-4, 0.0, -7.0, 1e9)),
    ],
)
def test_where_a_value_is(scale: Scale, value: object, place: float | None) -> None:
    assert scale.place(value) == (place if place is None else pytest.approx(place))


def test_ticks_and_the_choice_of_a_scale() -> None:
    assert [(tick.at, tick.label) for tick in Scale(0, 10).ticks()] == [(i / 5, str(2 * i)) for i in range(6)]
    assert [tick.label for tick in Scale(1e-4, 1.0, log=True).ticks()] == ["1e−4", "0.001", "0.01", "0.1", "1"]
    assert fit([1e-4, 1e-1]).log and not fit([1e-4, 1e-1], log=False).log
    assert not fit([1.0, 8.0]).log and not fit([-1.0, 800.0]).log
    assert fit_axis(Axis("lr", log=True), [0.1, 0.2]).log
    assert fit_axis(Axis("name"), ["b", "a"]).choices == ("a", "b")
    assert fit_axis(Axis("fp16", choices=("false",)), [False, "x"]).choices == ("false", "x")


@given(st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=20), st.sampled_from([None, False]))
def test_every_value_is_inside_and_ticks_are_few_and_in_order(values: list[float], log: bool | None) -> None:
    scale = fit(values, log=log)
    assert all(0 <= (scale.place(value) or 0) <= 1 for value in values)
    ticks = [tick.at for tick in scale.ticks(5)]
    assert ticks == sorted(ticks)
    assert len(ticks) <= 12


# Charts.


def places(element: Element) -> list[tuple[float, ...]]:
    """The points of a path."""
    return [tuple(map(float, pair.split())) for pair in (element.attributes["d"] or "")[1:].rstrip("Z").split("L")]


def test_a_line_goes_from_its_first_value_to_its_last_within_its_band() -> None:
    series = Series("loss", (0.0, 50.0, 100.0), (4.0, 2.0, 3.0), (3.0, 2.0, 1.0), (4.0, 9.0, 5.0))
    found = read(line_chart("loss", [Line(series, "train", "training loss", smooth=True)]))
    assert found.faults == []
    line, raw, band = (places(found.having(kind)[0]) for kind in ("line", "raw", "band"))
    assert [x for x, _ in line] == [x for x, _ in raw] == [0, 500, 1000]
    tops = [y for _, y in raw]
    assert tops[0] < tops[2] < tops[1], "high values are at the top"
    assert tops[2] == pytest.approx((tops[0] + tops[1]) / 2, abs=0.1)  # written in five digits
    assert min(y for _, y in band) == band[1][1] and len(band) == 6
    assert found.of("svg")[0].attributes["aria-label"] == "loss: training loss from 4 to 3 in 3 points"
    assert [item.text for item in found.of("li")] == ["training loss, last", "smoothed"]
    assert found.of("b")[0].text == "3"
    assert found.having("smoothing")


def test_charts_of_few_values_of_far_ones_and_of_speeds() -> None:
    def chart(title: str, steps: tuple[float, ...], values: tuple[float, ...]) -> Page:
        found = read(line_chart(title, [Line(Series(title, steps, values), "train", title)]))
        assert found.faults == [] and not found.having("band") and not found.of("li")
        return found

    assert len(chart("x", (3.0,), (1.0,)).having("dots")) == 1 and not chart("x", (), ()).having("dots")
    assert [one.text for one in chart("x", (1.0, 2.0), (900.0, 1.0)).of("small")] == ["logarithmic"]
    assert "0" in [one.text for one in chart("tokens per second", (0.0, 1.0), (1000.0, 1001.0)).having("y")]


@pytest.mark.parametrize(
    ("values", "weight", "mean"), [([3.0, 3.0], 0.9, [3.0, 3.0]), ([0.0, 1.0], 0.5, [0.0, 2 / 3]), ([1.0], 0.0, [1.0])]
)
def test_the_running_mean_starts_at_the_first_value_and_follows(
    values: list[float], weight: float, mean: list[float]
) -> None:
    assert smoothed(values, weight) == pytest.approx(mean)


def test_plan_and_measurement_are_on_one_scale(run: RunReport) -> None:
    found = read(memory_view(run.memory) or "")
    styles = [one.attributes["style"] or "" for one in found.of("i")]
    widths = [float(match[1]) for style in styles if (match := re.search("--w:([^;]+)", style))]
    assert sum(widths[:5]) == pytest.approx(1.0, abs=1e-3) and widths[5] == pytest.approx(79.9 / 81.681, abs=1e-3)
    assert "77.9 MiB" in found.text and "off by +2.2 %" in found.text and "379.4 MiB, 369.9 MiB" in found.text
    assert "was accurate" in read(memory_view(Memory(planned=100, measured=100)) or "").text
    assert "off by" not in read(memory_view(Memory(planned=100)) or "").text
    assert memory_view(Memory()) is None


def tops(sweep: SweepReport) -> dict[str, float]:
    """Where the first rung's marks are, by trial."""
    found = read(brackets_view(sweep) or "")
    assert found.faults == []
    tops: dict[str, float] = {}
    for mark in (one.attributes for one in found.having("mark") if one.tag == "button"):
        tops.setdefault(mark["data-trial"] or "", float((mark["style"] or "").split("top:")[1][:-1]))
    return tops


def test_a_mark_for_each_decision_the_better_the_higher(sweep: SweepReport) -> None:
    one = replace(sweep, ladders=sweep.ladders[:1])
    first = [decision for decision in one.ladders[0].decisions if decision.rung == 0]
    order = [decision.trial for decision in sorted(first, key=lambda decision: decision.metric)]
    assert sorted(tops(one), key=tops(one).__getitem__) == order and len(order) > 2
    assert sorted(tops(replace(one, smaller_is_better=False)), key=tops(one).__getitem__) == order
    upside_down = tops(replace(one, smaller_is_better=False))
    assert all(abs(top + upside_down[trial] - 100) < 0.1 for trial, top in tops(one).items())
    decisions = tuple(RungDecision(str(at), RungOutcome.STOPPED, 1, 0, 5, at or math.nan, "") for at in range(3))
    assert tops(replace(one, ladders=(BracketHistory(1, (5, 9), decisions),)))["0"] == 100
    assert all(brackets_view(replace(one, ladders=ladders)) is None for ladders in ((), (BracketHistory(1, (5,), ()),)))


def test_axes_lines_and_the_best_trial_on_top(sweep: SweepReport) -> None:
    bare = replace(sweep.trials[0], point={})
    found = read(parallel_view(replace(sweep, trials=(bare, *sweep.trials[1:]))) or "")
    assert found.faults == []
    lines, best = found.having("line"), sweep.ranked()[0].id
    assert (len(found.having("axis")), len(found.having("handle")), len(lines)) == (3, 6, 14)
    assert (lines[-1].attributes["data-trial"], lines[-1].attributes["class"]) == (best, "line best")
    data = json.loads(found.of("script")[0].text)
    heights = {trial: heights[-1] for trial, heights in data["trials"].items()}
    assert max(heights, key=heights.__getitem__) == best
    assert data["trials"].get(bare.id, [None, None])[:2] == [None, None]
    assert parallel_view(replace(sweep, axes=())) is None
    assert parallel_view(replace(sweep, trials=sweep.ranked()[:1])) is None


# Whole pages.


def test_the_page_of_a_run_holds_what_the_report_says(run: RunReport) -> None:
    run = replace(run, changes=(replace(run.changes[0], baselines=(("unigram", 4.69),)),))
    found = read(render_run(run))
    assert found.faults == []
    settings = ("ds_config.json:4", "0 before 0.19", "launcher", "step-002000", run.repeat)
    for expected in ("quickstart", "completed", "first 8.4", "unigram 4.69", *settings):
        assert expected in found.text, expected
    assert [element.text for element in found.of("h3")][:2] == ["loss", "val_accuracy"]
    link = next(one for one in found.of("a") if one.attributes.get("download"))
    assert link.attributes["download"] == "config.lock.yaml"
    assert unquote((link.attributes["href"] or "").split(",", 1)[1]) == run.lock
    failed = read(render_run(replace(run, message="loss became nan\nTry lr / 2.", left_out=("x: y",))))
    assert [one.text for one in failed.having("fault")] == ["loss became nan\nTry lr / 2.", "Not on this page: x: y."]
    bare = read(render_run(RunReport("bare", Status("not started", Tone.BUSY))))
    assert bare.faults == []
    assert [element.attributes["id"] for element in bare.of("section")] == ["summary"]


def test_the_page_of_a_sweep_holds_what_the_report_says(sweep: SweepReport) -> None:
    found = read(render_sweep(sweep))
    assert found.faults == []
    titles = ["Best configuration", "Learning curves", "Search space", "Decisions of the search", "Trials"]
    assert [element.text for element in found.of("h2")] == titles
    for expected in ("stopped early", "of training every trial to its end", "train_batch_size 6 is not", "12.7 KiB"):
        assert expected in found.text, expected
    rows = [one for one in found.of("tr") if one.attributes.get("data-said")]
    assert len(rows) == 14, "pruned points are not trials"
    assert rows[0].attributes["data-trial"] == sweep.ranked()[0].id
    link = next(one for one in found.of("a") if one.attributes.get("download"))
    assert sweep.best is not None and link.attributes["download"] == "best.yaml"
    assert unquote((link.attributes["href"] or "").split(",", 1)[1]) == sweep.best.text
    empty = read(render_sweep(SweepReport("new", Status("queued", Tone.BUSY), "grid", "loss", True, ())))
    assert empty.faults == [] and "no trial was measured" in empty.text


def test_a_curve_far_off_does_not_press_the_others_flat(sweep: SweepReport) -> None:
    far = replace(sweep.trials[2], curve=Series("validation_loss", (15.0, 60.0), (1e6, 1e7)), best=1e6)
    found = read(render_sweep(replace(sweep, trials=(*sweep.trials[:2], far, *sweep.trials[3:]))))
    assert "2 values far from the others are drawn at the edge." in found.text
    assert max(float(one.text.replace("k", "e3")) for one in found.having("y")) < 20


RENDERED: dict[str, Callable[[Any, Any], str]] = {
    "run": lambda run, sweep: render_run(run),
    "sweep": lambda run, sweep: render_sweep(sweep),
    "hostile run": lambda run, sweep: render_run(hostile_run(run)),
    "hostile sweep": lambda run, sweep: render_sweep(hostile_sweep(sweep)),
}


@pytest.mark.parametrize("kind", RENDERED)
def test_pages_load_nothing_and_hostile_names_stay_text(kind: str, run: RunReport, sweep: SweepReport) -> None:
    html = RENDERED[kind](run, sweep)
    found = read(html)
    assert found.faults == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    for element in found.elements:
        assert not any(name.startswith("on") for name in element.attributes)
        for name in ("src", "href", "action", "data"):
            target = element.attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), target
    (policy,) = [e for e in found.of("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert (policy.attributes["content"] or "").startswith("default-src 'none'")
    kinds = [element.attributes.get("type") for element in found.of("script")]
    assert html.count("<script>") == kinds.count(None) == 1, "one script is code, and it is ours"
    assert found.of("img") == []
    assert (found.of("h1")[0].text == HOSTILE) == kind.startswith("hostile")
