"""Points of a search: the whole grid, samples with their ends, and the same again for the same seed."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.preflight.ds_configs import explore, find_ranges, grid_values

GRID: dict[str, Any] = {
    "lr": {"type": "log", "minval": -3, "maxval": -1, "count": 3},
    "ds_config": {"zero_optimization": {"stage": {"type": "categorical", "vals": [1, 2]}}},
    "width": 8,
}


def test_a_grid():
    space = explore(GRID, "grid", 100)
    assert space.complete and space.total == 6
    assert [point.number for point in space.points] == [1, 2, 3, 4, 5, 6]
    assert space.points[1].values == {"lr": 0.001, "ds_config.zero_optimization.stage": 2}
    assert space.points[5].hyperparameters == {
        "lr": 0.1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "width": 8,
    }
    assert space.points[0].describe() == "lr=0.001, ds_config.zero_optimization.stage=1"
    assert GRID["ds_config"]["zero_optimization"]["stage"]["vals"] == [1, 2], "the space itself is left alone"


def test_a_grid_that_is_too_large_is_sampled():
    huge = {f"x{axis}": {"type": "int", "minval": 0, "maxval": 99, "count": 100} for axis in range(8)}
    space = explore(huge, "grid", 10)
    assert space.total == 100**8 and len(space.points) == 10 and not space.complete
    assert len({point.describe() for point in space.points}) == 10
    assert explore(huge, "grid", 10) == space != explore(huge, "grid", 10, seed=1)


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ({"type": "int", "minval": 1, "maxval": 9, "count": 3}, [1, 5, 9]),
        ({"type": "int", "minval": 1, "maxval": 2, "count": 9}, [1, 2]),
        ({"type": "int", "minval": 1, "maxval": 4, "count": 1}, [3]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 5}, [0.0, 0.25, 0.5, 0.75, 1.0]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 1}, [0.5]),
        ({"type": "double", "minval": 0, "maxval": 1}, [0.0, 1.0]),
        ({"type": "log", "base": 2, "minval": 0, "maxval": 3, "count": 4}, [1.0, 2.0, 4.0, 8.0]),
        ({"type": "categorical", "vals": ["a", None]}, ["a", None]),
    ],
)
def test_the_values_of_an_axis(spec: dict[str, Any], values: list[Any]):
    assert grid_values(spec) == pytest.approx(values) if spec["type"] == "log" else grid_values(spec) == values


def test_a_sample_has_the_ends_and_every_category():
    space = {
        "a": {"type": "double", "minval": -1.0, "maxval": 1.0},
        "b": {"type": "int", "minval": 3, "maxval": 5},
        "c": {"type": "categorical", "vals": list("pqrst")},
    }
    found = explore(space, "random", 8, seed=4)
    assert found.total is None and len(found.points) == 8
    assert [point.values["a"] for point in found.points][:2] == [-1.0, 1.0]
    assert {point.values["c"] for point in found.points} == set("pqrst")
    assert all(-1 <= point.values["a"] <= 1 and point.values["b"] in (3, 4, 5) for point in found.points)


def test_a_sample_of_categories_alone_can_be_complete():
    space = {"c": {"type": "categorical", "vals": [1, 2, 3]}}
    assert explore(space, "random", 50).complete
    assert explore(space, "random", 2).total is None


def test_constants_are_one_point():
    space = explore({"x": 1}, "random", 50)
    assert space.complete and [dict(point.values) for point in space.points] == [{}]
    assert list(find_ranges(GRID))[1][0] == ("ds_config", "zero_optimization", "stage")
