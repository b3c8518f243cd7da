"""Charts: scales, lines, memory, brackets, parallel coordinates."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.reading import read
from tests.report.samples import run_report, sweep_report
from zero_trial.report.curves import MOST_POINTS, curve, thinned
from zero_trial.report.page import bar, join, memory_view
from zero_trial.report.plot import (
    Line,
    Scale,
    fit,
    fit_axis,
    line_chart,
    smoothed,
)
from zero_trial.report.report_data import Axis, BracketHistory, Memory, RungDecision, RungOutcome, Series
from zero_trial.report.sweep_page import brackets_view, parallel_view


def test_places_and_round_ticks() -> None:
    scale = Scale(0, 10)
    assert (scale.place(0), scale.place(2.5), scale.place(11)) == (0.0, 0.25, 1.0)
    assert [(tick.at, tick.label) for tick in scale.ticks()] == [(i / 5, str(2 * i)) for i in range(6)]


def test_a_logarithmic_scale() -> None:
    scale = Scale(1e-4, 1.0, log=True)
    assert scale.place(1e-2) == pytest.approx(0.5)
    assert scale.place(0) is None
    assert [tick.label for tick in scale.ticks()] == ["1e−4", "0.001", "0.01", "0.1", "1"]


def test_choices_stand_at_equal_distances() -> None:
    scale = Scale(choices=("0", "1", "2"))
    low, middle, high = (scale.place(value) for value in (0, 1, 2))
    assert low is not None and middle is not None and high is not None
    assert middle - low == pytest.approx(high - middle)
    assert scale.place(7) is None
    assert Scale(choices=("one",)).place("one") == 0.5


@pytest.mark.parametrize("value", [None, True, "x", math.nan, math.inf])
def test_what_has_no_place(value: object) -> None:
    assert Scale().place(value) is None


def test_far_apart_values_get_a_logarithmic_scale() -> None:
    assert fit([1e-4, 1e-1]).log
    assert not fit([1.0, 8.0]).log
    assert not fit([-1.0, 800.0]).log
    assert not fit([1e-4, 1e-1], log=False).log


@pytest.mark.parametrize("value", [4e-4, 0.0, -7.0, 1e9])
def test_one_value_stands_in_the_middle_of_a_scale_of_its_own_size(value: float) -> None:
    scale = fit([value, value])
    assert scale.place(value) == pytest.approx(0.5)
    assert scale.high - scale.low == pytest.approx(abs(value) or 1.0)


def test_the_axis_of_a_swept_leaf() -> None:
    assert fit_axis(Axis("lr", log=True), [0.1, 0.2]).log
    assert fit_axis(Axis("stage", choices=("0", "3")), [3, 0]).choices == ("0", "3")
    assert fit_axis(Axis("name"), ["b", "a"]).choices == ("a", "b")
    assert fit_axis(Axis("fp16", choices=("false",)), [False, "x"]).choices == ("false", "x")


@given(st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=20), st.sampled_from([None, False]))
def test_every_value_is_inside_and_ticks_are_few_and_in_order(values: list[float], log: bool | None) -> None:
    scale = fit(values, log=log)
    assert all(0 <= (scale.place(value) or 0) <= 1 for value in values)
    ticks = [tick.at for tick in scale.ticks(5)]
    assert ticks == sorted(ticks)
    assert len(ticks) <= 12


def test_a_line_goes_from_its_first_value_to_its_last() -> None:
    page = read(
        line_chart("loss", [Line(Series("loss", (0.0, 50.0, 100.0), (4.0, 2.0, 3.0)), "train", "training loss")])
    )
    assert page.faults == []
    (line,) = page.having("line")
    places = [tuple(map(float, pair.split())) for pair in (line.attributes["d"] or "")[1:].split("L")]
    assert [x for x, _ in places] == [0, 500, 1000]
    tops = [y for _, y in places]
    assert tops[0] < tops[2] < tops[1], "high values are at the top"
    assert tops[2] == pytest.approx((tops[0] + tops[1]) / 2, abs=0.1)  # written in five digits
    (drawing,) = page.of("svg")
    assert drawing.attributes["aria-label"] == "loss: training loss from 4 to 3 in 3 points"


def test_the_script_is_given_the_values_themselves() -> None:
    page = read(line_chart("x", [Line(Series("x", (1.0, 2.0), (0.125, 0.25)), "train", "x", smooth=True)], slider=True))
    data = json.loads(page.of("script")[0].text)
    assert data["lines"][0]["values"] == [0.125, 0.25]
    assert page.having("smoothing")[0].attributes["min"] == "0"
    assert len(page.having("raw")) == 1


def test_single_steps_are_an_area_behind_their_means() -> None:
    series = Series("loss", (2.0, 4.0), (3.0, 2.0), low=(2.5, 1.0), high=(3.5, 9.0))
    page = read(line_chart("loss", [Line(series, "train", "loss")]))
    (band,) = page.having("band")
    heights = [float(pair.split()[1]) for pair in (band.attributes["d"] or "")[1:-1].split("L")]
    assert len(heights) == 4 and min(heights) == heights[1], "9 is the highest place"
    assert not read(line_chart("loss", [Line(Series("loss", (1.0,), (1.0,)), "train", "loss")])).having("band")


def test_a_logarithmic_axis_says_so_and_the_key_has_the_last_value_as_it_was_reported() -> None:
    line = Line(Series("loss", (1.0, 2.0, 3.0), (900.0, 1.0, 1.0)), "train", "loss", smooth=True)
    page = read(line_chart("loss", [line], slider=True))
    assert [element.text for element in page.of("small")] == ["logarithmic"]
    assert [item.text for item in page.of("li")] == ["loss, last", "smoothed"] and page.of("b")[0].text == "1"
    long = Line(curve((step, step) for step in range(5000)).series("loss"), "train", "loss")
    assert read(line_chart("loss", [long])).of("b")[0].text == "4999"  # not the mean of the last pixel
    flat = read(line_chart("loss", [Line(Series("loss", (1.0, 2.0), (2.0, 1.0)), "train", "loss")]))
    assert flat.of("small") == []


def test_one_value_is_a_dot() -> None:
    assert len(read(line_chart("x", [Line(Series("x", (3.0,), (1.0,)), "train", "x")])).having("dots")) == 1


def test_no_values_are_an_empty_chart() -> None:
    assert read(line_chart("x", [Line(Series("x", (), ()), "train", "x")])).faults == []


def test_an_axis_that_begins_at_zero() -> None:
    series = Series("speed", (0.0, 1.0), (1000.0, 1001.0))
    labels = [e.text for e in read(line_chart("speed", [Line(series, "other", "speed")], zero=True)).having("y")]
    assert "0" in labels


def test_many_points_become_means_of_their_neighbours() -> None:
    series = Series("x", tuple(map(float, range(6000))), tuple(float(i % 2) for i in range(6000)))
    thin = thinned(series)
    assert len(thin) == MOST_POINTS
    assert set(thin.values) == {0.5} and set(thin.low) == {0.0} and set(thin.high) == {1.0}
    assert thin.steps[0] == pytest.approx(4.5)
    assert thinned(thin) == thin


def test_the_running_mean_starts_at_the_first_value_and_follows() -> None:
    assert smoothed([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0, 3.0, 3.0])
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])
    assert smoothed([1.0, 5.0], 0.0) == [1.0, 5.0]


def widths(html: str) -> list[float]:
    styles = [
        e.attributes.get("style") or "" for e in read(html).of("i") if "stack" not in (e.attributes.get("class") or "")
    ]
    return [float(style.split("--w:")[1].split(";")[0]) for style in styles if "--w:" in style]


def test_plan_and_measurement_stand_on_one_scale() -> None:
    view = memory_view(run_report().memory)
    assert view is not None
    *parts, measured = widths(view)
    assert sum(parts) == pytest.approx(1.0, abs=1e-3)
    assert measured == pytest.approx(23_000_000 / 23_562_252, abs=1e-3)
    text = read(view).text
    assert "22.5 MiB" in text and "off by +2.4 %" in text and "379.4 MiB, 369.9 MiB" in text


def test_a_plan_that_came_true_and_one_without_a_measurement() -> None:
    assert "came true" in read(memory_view(Memory(planned=100, measured=100)) or "").text
    assert "off by" not in read(memory_view(Memory(planned=100)) or "").text


def test_a_bar_in_a_table() -> None:
    assert "--w:0.5" in join(bar(10, 20, "10 B"))
    assert join(bar(None, 20, "–")) == "–"


def test_a_mark_for_each_decision_the_better_the_higher() -> None:
    report = sweep_report(8)
    page = read(brackets_view(report) or "")
    assert page.faults == []
    marks = [e for e in page.having("mark") if e.tag == "button"]
    assert len(marks) == len(report.ladders[0].decisions) == 10
    assert len(page.having("climb")) == 2
    top = {
        e.attributes["data-trial"]: float((e.attributes["style"] or "").split("top:")[1].rstrip("%")) for e in marks[:8]
    }
    order = sorted(report.ladders[0].decisions[:8], key=lambda decision: decision.metric)
    assert [trial for trial, _ in sorted(top.items(), key=lambda item: item[1])] == [d.trial for d in order]
    assert "best 1 may go on" in (marks[2].attributes["aria-label"] or "")


def test_where_more_is_better_more_is_up() -> None:
    up = read(brackets_view(replace(sweep_report(4), smaller_is_better=False)) or "")
    down = read(brackets_view(sweep_report(4)) or "")
    tops = [
        [
            float((e.attributes["style"] or "").split("top:")[1].rstrip("%"))
            for e in p.having("mark")
            if e.tag == "button"
        ]
        for p in (up, down)
    ]
    assert all(abs(a + b - 100) < 0.1 for a, b in zip(*tops, strict=True))


def test_a_metric_that_is_not_a_number_stands_at_the_worse_end() -> None:
    decisions = (
        RungDecision("1", RungOutcome.WENT_ON, 1, 0, 5, 1.0, ""),
        RungDecision("2", RungOutcome.STOPPED, 1, 0, 5, float("nan"), ""),
    )
    page = read(brackets_view(replace(sweep_report(4), ladders=(BracketHistory(1, (5, 9), decisions),))) or "")
    (stopped,) = [e for e in page.having("stopped") if e.tag == "button"]
    assert "top:100%" in (stopped.attributes["style"] or "")


def test_axes_lines_and_the_best_trial_on_top() -> None:
    report = sweep_report(8)
    page = read(parallel_view(report) or "")
    assert page.faults == []
    assert len(page.having("axis")) == 4
    lines = page.having("line")
    assert len(lines) == 8
    best = report.ranked()[0].id
    assert (lines[-1].attributes["data-trial"], lines[-1].attributes["class"]) == (best, "line best")
    data = json.loads(page.of("script")[0].text)
    heights = {trial: places[-1] for trial, places in data["trials"].items()}
    assert max(heights, key=heights.__getitem__) == best
    assert len(page.having("handle")) == 8


def test_a_missing_value_has_no_place() -> None:
    report = sweep_report(4)
    bare = replace(report.trials[0], point={})
    page = read(parallel_view(replace(report, trials=(bare, *report.trials[1:]))) or "")
    data = json.loads(page.of("script")[0].text)
    assert data["trials"][bare.id][:3] == [None, None, None]


def test_nothing_known_is_nothing_shown() -> None:
    report = sweep_report(4)
    assert memory_view(Memory()) is None
    for ladders in ((), (BracketHistory(1, (5,), ()),)):
        assert brackets_view(replace(report, ladders=ladders)) is None
    assert parallel_view(sweep_report(1)) is None
    assert parallel_view(replace(report, axes=())) is None
