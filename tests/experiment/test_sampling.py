"""Samples of every kind of hyperparameter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.hyperparameters import is_const
from zero_trial.experiment.space import sample


class Numbers:
    """Python's own numbers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return self._random.randrange(count)

    def unit(self) -> float:
        return self._random.random()

    def power(self, base: float, exponent: float) -> float:
        return base**exponent


def many(spec: Any, count: int = 400) -> list[Any]:
    return [sample({"x": spec}, Numbers(seed))["x"] for seed in range(count)]


def test_a_nested_space():
    space = {
        "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -3},
        "ds_config": {"zero_optimization": {"stage": {"type": "categorical", "vals": [2]}}, "betas": [0.9, 0.95]},
        "optimizer": {"type": "const", "val": {"type": "Adam"}},
        "nothing": None,
        "empty": {},
    }
    assert sample(space, Numbers(0)) == {
        "lr": pytest.approx(0.001),
        "ds_config": {"zero_optimization": {"stage": 2}, "betas": [0.9, 0.95]},
        "optimizer": {"type": "Adam"},
        "nothing": None,
        "empty": {},
    }


def test_both_ends_of_an_int():
    assert set(many({"type": "int", "minval": -1, "maxval": 2})) == {-1, 0, 1, 2}


def test_double_and_log():
    assert all(0.5 <= value <= 2 for value in many({"type": "double", "minval": 0.5, "maxval": 2}))
    values = many({"type": "log", "base": 2, "minval": -4, "maxval": 4})
    assert all(2**-4 <= value <= 2**4 for value in values)
    assert sum(value < 1 for value in values) == pytest.approx(200, abs=50)  # even in the exponent


def test_categorical_values_may_be_anything():
    values = many({"type": "categorical", "vals": [{"type": "Adam"}, None, [1]]})
    assert {str(value) for value in values} == {"{'type': 'Adam'}", "None", "[1]"}


def test_the_order_of_the_names_does_not_matter():
    one = {"a": {"type": "int", "minval": 0, "maxval": 10**9}, "b": {"type": "int", "minval": 0, "maxval": 10**9}}
    other = dict(reversed(one.items()))
    assert sample(one, Numbers(1)) == sample(other, Numbers(1))
    assert list(sample(other, Numbers(1))) == ["b", "a"]


def test_what_is_sampled_is_not_shared():
    space = {"a": [1], "b": {"type": "categorical", "vals": [[1]]}, "c": {"type": "const", "val": [1]}}
    drawn = sample(space, Numbers(0))
    for name in "abc":
        drawn[name].append(2)
    assert sample(space, Numbers(0)) == {"a": [1], "b": [1], "c": [1]}


def test_at_the_top_type_is_a_name():
    assert sample({"type": "int", "minval": 1}, Numbers(0)) == {"type": "int", "minval": 1}


def test_is_const():
    assert is_const({"type": "const", "val": None}) and not is_const({"val": None}) and not is_const(3)


def test_a_kind_that_is_none():
    from zero_trial.experiment.space import _draw

    with pytest.raises(ConfigError, match="no kind of hyperparameter: got nice"):
        _draw({"type": "nice"}, Numbers(0))
