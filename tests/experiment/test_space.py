"""Points of a search: the whole grid, samples with their ends, and the same again for the same
seed."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.hyperparameters import find_ranges
from zero_trial.experiment.space import Grid, axis_values, explore

GRID: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1, "count": 3},
    "ds_config": {"zero_optimization": {"stage": {"type": "categorical", "vals": [1, 2]}}},
    "width": 8,
}


def test_a_grid():
    space = explore(GRID, "grid", 100)
    assert space.complete and space.total == 6
    assert [point.number for point in space.points] == [1, 2, 3, 4, 5, 6]
    assert space.points[1].values == {"ds_config.zero_optimization.stage": 1, "lr": 0.01}
    assert space.points[5].hyperparameters == {
        "lr": 0.1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "width": 8,
    }
    assert space.points[0].describe() == "ds_config.zero_optimization.stage=1, lr=0.001"
    assert GRID["ds_config"]["zero_optimization"]["stage"]["vals"] == [1, 2], "the space itself is left alone"


def test_a_grid_that_is_too_large_is_sampled():
    huge = {f"x{axis}": {"type": "int", "minval": 0, "maxval": 99, "count": 100} for axis in range(2)}
    space = explore(huge, "grid", 10)
    assert space.total == 100**2 and len(space.points) == 10 and not space.complete
    assert len({point.describe() for point in space.points}) == 10
    assert explore(huge, "grid", 10) == space != explore(huge, "grid", 10, seed=1)


def test_a_check_looks_at_the_very_points_that_the_master_starts():
    """Halves are rounded away from zero below it too, and the axes are in alphabetical order."""
    space = {"n": {"type": "int", "minval": -2, "maxval": 3, "count": 3}, "a": {"type": "categorical", "vals": [1, 2]}}
    grid = Grid.of(space)
    started = [grid.point(number) for number in range(grid.size)]
    assert [point.hyperparameters for point in explore(space, "grid", 100).points] == started
    assert axis_values({"type": "int", "minval": -3, "maxval": 0, "count": 3}) == (-3, -2, 0)


def test_a_grid_needs_counts_and_an_end():
    with pytest.raises(ConfigError, match="count was not provided"):
        explore({"lr": {"type": "double", "minval": 0, "maxval": 1}}, "grid", 10)
    huge = {f"x{axis}": {"type": "int", "minval": 0, "maxval": 99, "count": 100} for axis in range(8)}
    with pytest.raises(ConfigError, match="too many points"):
        explore(huge, "grid", 10)


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
