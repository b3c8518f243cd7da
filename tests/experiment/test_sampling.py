"""Samples of every kind of hyperparameter."""

from __future__ import annotations

import random

import pytest

from zero_trial.experiment.space import sample


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
    assert sample(space, Numbers(0)) == {
        "lr": pytest.approx(0.001),
        "ds_config": {"zero_optimization": {"stage": 2}, "betas": [0.9, 0.95]},
        "optimizer": {"type": "Adam"},
        "nothing": None,
        "empty": {},
    }


def test_both_ends_of_an_int():
    space = {"x": {"type": "int", "minval": -1, "maxval": 2}}
    assert {sample(space, Numbers(seed))["x"] for seed in range(100)} == {-1, 0, 1, 2}


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
