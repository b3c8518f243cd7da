"""Partitions: the methods, and that the balanced one is the best there is."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from zero_trial.errors import ConfigError
from zero_trial.pipeline.layers import LayerFacts, balanced, partition, uniform

GPT = [
    LayerFacts("Embedding", 500),
    *[LayerFacts("Block", 100)] * 6,
    LayerFacts("LayerNorm", 2),
    LayerFacts("Linear", 500),
]


def test_the_methods():
    assert partition("uniform", GPT, 3) == [0, 3, 6, 9] and partition("parameters", GPT, 3) == [0, 2, 8, 9]
    assert partition("type:block", GPT, 3) == [0, 3, 5, 9]
    assert partition("profile", GPT, 3, [0, 1, 1, 1, 1, 1, 1, 0, 6]) == [0, 4, 8, 9]
    assert partition(" Parameters ", GPT, 1) == [0, 9]


def test_uniform_gives_the_rest_to_the_first():
    assert uniform(10, 4) == [0, 3, 6, 8, 10] and uniform(4, 4) == [0, 1, 2, 3, 4]


def brute(weights: list[float], parts: int) -> tuple[float, float]:
    """The least heaviest part and then the least sum of squares of all cuts."""
    prices = []
    for inner in combinations(range(1, len(weights)), parts - 1):
        bounds = [0, *inner, len(weights)]
        sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
        prices.append((max(sums), sum(part * part for part in sums)))
    return min(prices)


def test_balanced_is_the_best_of_all_cuts():
    rng = random.Random(1)
    for _ in range(200):
        count = rng.randint(1, 9)
        weights = [float(rng.choice([0, 1, 2, 3, 50, rng.randint(0, 20)])) for _ in range(count)]
        parts = rng.randint(1, count)
        bounds = balanced(weights, parts)
        assert bounds[0] == 0 and bounds[-1] == count and len(bounds) == parts + 1
        assert all(a < b for a, b in pairwise(bounds))
        sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
        assert (max(sums), sum(part * part for part in sums)) == brute(weights, parts)


def test_balanced_by_times():
    """Fractions whose sums are not exact: the second pass must find again what the first has
    found."""
    weights = [0.1 * (index % 7) + 0.013 for index in range(60)]
    for parts in (1, 2, 7, 60):
        bounds = balanced(weights, parts)
        assert len(bounds) == parts + 1 and sorted(set(bounds)) == bounds


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("best", "unknown partition method: got 'best', expected uniform, parameters, type:REGEX or profile"),
        (
            "type:attention",
            "no layer's class matches: got type:attention, expected one of Block, Embedding, LayerNorm, Linear",
        ),
        ("type:(", r"not a regular expression: got type:\("),
        ("profile", "needs a measured time for each layer: got none, expected 9 times"),
    ],
)
def test_what_cannot_be_used(method: str, message: str):
    with pytest.raises(ConfigError, match=message):
        partition(method, GPT, 2)


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:block"])
@pytest.mark.parametrize("parts", [0, 10])
def test_no_part_is_empty(method: str, parts: int):
    with pytest.raises(ConfigError, match=f"every part of a pipeline needs a layer: got 9 layers for {parts} parts"):
        partition(method, GPT, parts)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight: float):
    with pytest.raises(ConfigError, match="not a finite number"):
        balanced([1.0, weight], 2)
