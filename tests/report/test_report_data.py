"""What a report is made from: curves, dotted names, swept axes and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_trial.report.report_data import (
    Axis,
    Curve,
    SweepReport,
    differing_axes,
    leaves,
    most_of_each,
    reach,
    swept_axes,
    thinned,
)


def curve(*pairs: tuple[Any, Any]) -> Curve:
    made = Curve()
    for step, value in pairs:
        made.add(step, value)
    return made


def test_values_come_in_any_order_and_the_later_counts() -> None:
    found = curve((2, 5.0), (1, 4.0), (2, 6.0), (3, math.nan), (None, 1.0), (4, "x"), (5, True))
    assert (found.series("x").steps, found.series("x").values) == ((1.0, 2.0), (4.0, 6.0))
    assert found.ends() == ((1.0, 4.0), (2.0, 6.0))
    assert (found.best(True), found.best(False), Curve().best(True)) == (4.0, 6.0, None)
    assert Curve([2.0, 1.0], [5.0, 4.0]).series("x").steps == (1.0, 2.0)


def test_a_run_that_starts_again_takes_back_what_is_beyond() -> None:
    found = curve((5, 4.0))
    assert found.series("x").low == ()
    for step in range(1, 6):
        found.add(step * 10, float(step), [step - 1.0, step + 1.0])
    found.rewind(30)
    found.add(40, 9.0, [8.0, 10.0])
    made = found.series("x")
    assert (made.steps, made.values) == ((5.0, 10.0, 20.0, 30.0, 40.0), (4.0, 1.0, 2.0, 3.0, 9.0))
    assert (made.low, made.high) == ((4.0, 0.0, 1.0, 2.0, 8.0), (4.0, 2.0, 3.0, 4.0, 10.0))


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 40))
def test_no_value_is_outside_of_what_is_drawn(pairs: list[tuple[int, float]], most: int) -> None:
    made = curve(*pairs)
    drawn, whole = made.series("x", most), made.series("x", 10**6)
    assert len(drawn) <= max(most, 1) or len(whole) <= most
    assert list(drawn.steps) == sorted(set(drawn.steps))
    if len(whole) > most:
        assert (min(drawn.low), max(drawn.high)) == (min(whole.values), max(whole.values))
        assert all(
            low <= value + 1e-6 and value <= high + 1e-6
            for low, value, high in zip(drawn.low, drawn.values, drawn.high, strict=True)
        )


def test_a_pixel_is_a_span_of_steps_and_the_last_value_is_known() -> None:
    steps = [*range(100), 900, 1000]
    drawn = curve(*((step, float(step)) for step in steps)).series("x", 10)
    assert drawn.steps == pytest.approx((49.5, 950.0))
    assert drawn.low == (0.0, 900.0) and drawn.high == (99.0, 1000.0) and drawn.last == 1000.0
    assert thinned(drawn, 10) == drawn
    assert [most_of_each(lines) for lines in (0, 1, 100, 10**6)] == [600, 600, 240, 120]


def test_trials_are_ranked_by_the_searchers_own_direction(sweep: SweepReport) -> None:
    values = [trial.best for trial in sweep.ranked()]
    assert len(values) == 14 < len(sweep.trials) and None not in values
    assert values == sorted(values)  # type: ignore[type-var]
    larger = replace(sweep, smaller_is_better=False).ranked()
    assert [trial.best for trial in larger] == values[::-1]


def test_leaves_by_dotted_name() -> None:
    assert leaves({"a": {"b": 1, "c": [1, 2], "e": {}}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}
    assert [reach({"a": {"b": 1}}, name) for name in ("a.b", "a.b.c", "x")] == [1, None, None]


def test_the_ranges_of_an_experiment() -> None:
    space = {
        "ds_config": {"optimizer": {"params": {"lr": {"type": "log", "minval": -4, "maxval": -1}}}},
        "stage": {"type": "categorical", "vals": [0, True, "x"]},
        "width": {"type": "int", "minval": 1, "maxval": 4},
        "batch": 16,
    }
    assert swept_axes(space) == (
        Axis("ds_config.optimizer.params.lr", log=True),
        Axis("stage", choices=("0", "true", "x")),
        Axis("width"),
    )


def test_what_differs_between_runs() -> None:
    points = [{"lr": 0.1 * n, "stage": n % 2, "same": 1, "name": "b" if n else "a"} for n in range(5)]
    assert differing_axes(points) == (Axis("lr"), Axis("stage", choices=("0", "1")), Axis("name", choices=("a", "b")))
    # few numbers are choices in their own order
    assert differing_axes([{"n": 10}, {"n": 9}, {}]) == (Axis("n", choices=("9", "10", "null")),)
