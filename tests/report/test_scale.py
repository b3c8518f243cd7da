"""Scales: places, ticks, and which kind of scale values call for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_trial.report.data import Axis
from zero_trial.report.plot import Scale, fit, fit_axis


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
