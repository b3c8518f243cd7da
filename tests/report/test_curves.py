"""Curves that grow, and what is drawn of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_trial.report.curves import Curve, curve, thinned


def test_values_come_in_any_order_and_the_later_counts() -> None:
    found = curve([(2, 5.0), (1, 4.0), (2, 6.0), (3, math.nan), (None, 1.0), (4, "x"), (5, True)])
    assert (found.series("x").steps, found.series("x").values) == ((1.0, 2.0), (4.0, 6.0))
    assert found.ends() == ((1.0, 4.0), (2.0, 6.0))
    assert (found.best(True), found.best(False), Curve().best(True)) == (4.0, 6.0, None)


def test_a_run_that_starts_again_takes_back_what_is_beyond() -> None:
    found = Curve()
    for step in range(1, 6):
        found.add(step * 10, float(step), [step - 1.0, step + 1.0])
    found.rewind(30)
    found.add(40, 9.0, [8.0, 10.0])
    made = found.series("x")
    assert (made.steps, made.values) == ((10.0, 20.0, 30.0, 40.0), (1.0, 2.0, 3.0, 9.0))
    assert (made.low, made.high) == ((0.0, 1.0, 2.0, 8.0), (2.0, 3.0, 4.0, 10.0))


def test_bounds_are_there_from_the_first_mean_of_several_steps_on() -> None:
    found = curve([(1, 4.0)])
    found.add(2, 5.0, [5.0])
    assert found.series("x").low == ()
    found.add(4, 6.0, [2.0, 10.0])
    assert (found.series("x").low, found.series("x").high) == ((4.0, 5.0, 2.0), (4.0, 5.0, 10.0))


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 40))
def test_no_value_is_outside_of_what_is_drawn(pairs: list[tuple[int, float]], most: int) -> None:
    made = curve(pairs)
    drawn, whole = made.series("x", most), made.series("x", 10**6)
    assert len(drawn) <= max(most, 1) or len(whole) <= most
    assert list(drawn.steps) == sorted(set(drawn.steps))
    if len(whole) > most:
        assert (min(drawn.low), max(drawn.high)) == (min(whole.values), max(whole.values))
        assert all(
            low <= value + 1e-6 and value <= high + 1e-6
            for low, value, high in zip(drawn.low, drawn.values, drawn.high, strict=True)
        )


def test_a_pixel_is_a_span_of_steps_and_not_a_number_of_points() -> None:
    steps = [*range(100), 900, 1000]
    drawn = curve((step, float(step)) for step in steps).series("x", 10)
    assert drawn.steps == pytest.approx((49.5, 950.0))
    assert drawn.low == (0.0, 900.0) and drawn.high == (99.0, 1000.0)
    assert thinned(drawn, 10) == drawn
