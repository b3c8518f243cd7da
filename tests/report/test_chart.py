"""Line charts: that the drawing is where the values are, thinning and smoothing, and what is said of them in words."""

from __future__ import annotations

import json

import pytest

from tests.report.reading import read
from zero_trial.report.data import Series
from zero_trial.report.plot import MOST_POINTS, Line, line_chart, smoothed, thinned


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
    assert set(thin.values) == {0.5}
    assert thin.steps[0] == pytest.approx(4.5)
    assert thinned(thin) == thin


def test_the_running_mean_starts_at_the_first_value_and_follows() -> None:
    assert smoothed([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0, 3.0, 3.0])
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])
    assert smoothed([1.0, 5.0], 0.0) == [1.0, 5.0]
