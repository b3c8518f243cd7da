"""Hyperparameters as Determined reads them; and the points of a search: the whole grid, samples
with their ends, and random draws."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.space import Grid, axis_values, explore, find_ranges, read_hyperparameters, sample
from zero_trial.schema.document import Document, Location

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
    last = {"lr": 0.1, "ds_config": {"zero_optimization": {"stage": 2}}, "width": 8}
    assert space.points[5].hyperparameters == last
    with pytest.raises(ConfigError, match="count was not provided"):
        explore({"lr": {"type": "double", "minval": 0, "maxval": 1}}, "grid", 10)
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


def test_constants_are_one_point():
    space = explore({"x": 1}, "random", 50)
    assert space.complete and [dict(point.values) for point in space.points] == [{}]
    categories = {"c": {"type": "categorical", "vals": [1, 2, 3]}}
    assert explore(categories, "random", 50).complete
    assert explore(categories, "random", 2).total is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"type": "int", "minval": 0, "maxval": 4, "count": 5}, [0, 1, 2, 3, 4]),
        ({"type": "int", "minval": 0, "maxval": 1, "count": 9}, [0, 1]),
        ({"type": "int", "minval": 0, "maxval": 5, "count": 1}, [3]),
        ({"type": "int", "minval": -5, "maxval": 0, "count": 1}, [-3]),
        ({"type": "int", "minval": 0, "maxval": 10, "count": 4}, [0, 3, 7, 10]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 3}, [0, 0.5, 1]),
        ({"type": "log", "base": 10, "minval": -3, "maxval": -1, "count": 3}, [1e-3, 1e-2, 1e-1]),
        ({"type": "log", "base": 2, "minval": 0, "maxval": 4, "count": 1}, [4]),
        ({"type": "categorical", "vals": [None, {"a": 1}]}, [None, {"a": 1}]),
    ],
)
def test_axis_values(spec: dict[str, Any], expected: list[Any]):
    values = axis_values(spec)
    assert list(values) == (pytest.approx(expected) if isinstance(values[0], float) else expected)
    assert list(map(type, values)) == list(map(type, expected))  # a whole double arrives without its ".0"


class Numbers:
    """Python's own numbers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return self._random.randrange(count)

    def unit(self) -> float:
        return self._random.random()


def test_a_nested_space():
    space = {
        "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -3},
        "ds_config": {"zero_optimization": {"stage": {"type": "categorical", "vals": [2]}}, "betas": [0.9, 0.95]},
        "optimizer": {"type": "const", "val": {"type": "Adam"}},
        "nothing": None,
        "empty": {},
    }
    config = {"zero_optimization": {"stage": 2}, "betas": [0.9, 0.95]}
    drawn = {
        "lr": pytest.approx(0.001),
        "ds_config": config,
        "optimizer": {"type": "Adam"},
        "nothing": None,
        "empty": {},
    }
    assert sample(space, Numbers(0)) == drawn
    ends = {"x": {"type": "int", "minval": -1, "maxval": 2}}
    assert {sample(ends, Numbers(seed))["x"] for seed in range(100)} == {-1, 0, 1, 2}
    wide = {"type": "int", "minval": 0, "maxval": 10**9}
    one, other = (sample(dict.fromkeys(order, wide), Numbers(1)) for order in ("ab", "ba"))
    assert one == other and list(other) == ["b", "a"]  # the order of the names does not matter


def test_what_is_sampled_is_not_shared():
    space = {"a": [1], "b": {"type": "categorical", "vals": [[1]]}, "c": {"type": "const", "val": [1]}}
    drawn = sample(space, Numbers(0))
    for name in "abc":
        drawn[name].append(2)
    assert sample(space, Numbers(0)) == {"a": [1], "b": [1], "c": [1]}


def read(value: dict[str, Any]) -> dict[str, Any]:
    return read_hyperparameters(Document.of(value, Location(prefix="hyperparameters"))).value


def test_consts_become_values_and_ranges_stay():
    lr = {"type": "log", "base": 10, "minval": -5, "maxval": -3}
    value = read(
        {"a": 1, "b": {"type": "const", "val": [1]}, "model": {"depth": {"type": "const", "val": 3}, "lr": lr}}
    )
    assert value == {"a": 1, "b": [1], "model": {"depth": 3, "lr": lr}}
    assert list(find_ranges(value)) == [(("model", "lr"), lr)]


def test_places_move_with_a_const():
    document = Document(
        {"ds_config": {"type": "const", "val": {"train_batch_size": 4}}},
        {("ds_config", "val", "train_batch_size"): Location("const.yaml", 9)},
    )
    resolved = read_hyperparameters(document)
    assert resolved.at(("ds_config", "train_batch_size")).line == 9


def test_a_const_holds_anything_and_a_top_level_hyperparameter_may_be_called_type():
    inner = {"optimizer": {"type": "Adam", "params": {"lr": 1}}}
    assert read({"ds_config": {"type": "const", "val": inner}}) == {"ds_config": inner}
    for space in ({"type": "big"}, {"type": "const", "val": 1}):
        assert read(space) == space
