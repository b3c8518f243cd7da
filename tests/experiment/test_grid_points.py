"""The points of a grid."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.space import Grid, axis_values


def test_a_grid_of_two_axes():
    grid = Grid.of(
        {
            "b": {"type": "categorical", "vals": ["x", "y"]},
            "a": {"c": {"type": "int", "minval": 0, "maxval": 4, "count": 3}},
        }
    )
    assert grid.size == 6
    assert [(point["a"]["c"], point["b"]) for point in map(grid.point, range(6))] == [
        (0, "x"),
        (0, "y"),
        (2, "x"),
        (2, "y"),
        (4, "x"),
        (4, "y"),
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"type": "int", "minval": 0, "maxval": 4, "count": 5}, [0, 1, 2, 3, 4]),
        ({"type": "int", "minval": 0, "maxval": 1, "count": 9}, [0, 1]),
        ({"type": "int", "minval": 0, "maxval": 10, "count": 1}, [5]),
        ({"type": "int", "minval": 0, "maxval": 5, "count": 1}, [3]),
        ({"type": "int", "minval": -5, "maxval": 0, "count": 1}, [-3]),
        ({"type": "int", "minval": 0, "maxval": 10, "count": 4}, [0, 3, 7, 10]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 3}, [0, 0.5, 1]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 1}, [0.5]),
        ({"type": "log", "base": 10, "minval": -3, "maxval": -1, "count": 3}, [1e-3, 1e-2, 1e-1]),
        ({"type": "log", "base": 2, "minval": 0, "maxval": 4, "count": 1}, [4]),
        ({"type": "categorical", "vals": [None, {"a": 1}]}, [None, {"a": 1}]),
    ],
)
def test_axis_values(spec: dict[str, Any], expected: list[Any]):
    values = axis_values(spec)
    assert list(values) == (pytest.approx(expected) if isinstance(values[0], float) else expected)
    assert list(map(type, values)) == list(map(type, expected))  # a whole double arrives without its ".0"


def test_constants_and_empty_maps_stay():
    space = {"a": {}, "b": {"type": "const", "val": {"type": "Adam"}}, "c": [1], "d": {"e": 2}}
    grid = Grid.of(space)
    assert grid.size == 1
    assert grid.point(0) == {"a": {}, "b": {"type": "Adam"}, "c": [1], "d": {"e": 2}}


def test_a_grid_is_never_made_as_a_whole():
    axis = {"type": "int", "minval": 0, "maxval": 9, "count": 10}
    grid = Grid.of(dict.fromkeys("abcdef", axis))
    assert grid.size == 10**6
    assert grid.point(grid.size - 1) == dict.fromkeys("abcdef", 9)


@pytest.mark.parametrize(
    "space",
    [
        {"a": {"type": "double", "minval": 0, "maxval": 1, "count": 10**12}},
        {name: {"type": "int", "minval": 0, "maxval": 999, "count": 1000} for name in "abc"},
    ],
)
def test_a_grid_without_end(space: dict[str, Any]):
    with pytest.raises(ConfigError, match="the grid has too many points"):
        Grid.of(space)


def test_no_count():
    with pytest.raises(ConfigError, match="grid search is in use but count was not provided"):
        Grid.of({"a": {"type": "double", "minval": 0, "maxval": 1}})
