"""Searches played through with synthetic learning curves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.master.search.driving import LR
from zero_trial.master.search.searcher import build
from zero_trial.master.search.simulation import CURVES, Curve, RungCount, Setup, Simulated, power, simulate


@pytest.mark.parametrize("name", sorted(CURVES))
def test_the_same_for_the_same_seed(name: str):
    curve, same, other = (CURVES[name](seed) for seed in (1, 1, 2))
    assert [curve(part / 8) for part in range(9)] == [same(part / 8) for part in range(9)]
    assert curve(0.5) != other(0.5)


@pytest.mark.parametrize("name", ["power", "crossing"])
def test_they_fall_from_five(name: str):
    for seed in range(20):
        values = [CURVES[name](seed)(part / 16) for part in range(17)]
        assert values[0] == pytest.approx(5.0) and values == sorted(values, reverse=True) and values[-1] >= 0.99


def test_an_early_trial_is_last_in_one_and_first_in_the_other():
    early, late = 0.1, 1.0
    for name, agrees in (("power", True), ("crossing", False)):
        curves = [CURVES[name](seed) for seed in range(40)]
        first = min(curves, key=lambda curve: curve(early))
        rank = sorted(curve(late) for curve in curves).index(first(late))
        assert (rank < 10) is agrees


ASHA = {
    "name": "adaptive_asha",
    "metric": "loss",
    "max_trials": 8,
    "max_time": 16,
    "time_metric": "batches",
    "mode": "aggressive",
}


def played(config: dict[str, Any], **changes: Any) -> Simulated:
    setup = {"metric": "loss", "unit": "batches", "length": 16, "period": 4, "smaller_is_better": True, "curve": power}
    return simulate(build(config, LR, seed=2), Setup(**{**setup, **changes}))


def each_worse() -> Callable[[int], Curve]:
    """The first trial has a loss of 1 all the way, the second of 2, and so on."""
    ranks = itertools.count(1)

    def curve(seed: int) -> Curve:
        rank = next(ranks)
        return lambda fraction: rank

    return curve


def test_two_rungs_by_hand():
    """One bracket: log4(8) + 1 = 2 rungs, after 4 and 16 batches. Eight trials start together, and
    the k-th is worse than the one before it: only the first goes on. 8 x 4 batches, and 12 more for
    the first.
    """
    found = played({**ASHA, "max_concurrent_trials": 8}, curve=each_worse())
    assert found.rungs == (RungCount(1, 4, 8, 7), RungCount(1, 16, 1, 0))
    assert (found.trials, found.spent, found.whole, found.elapsed) == (8, 8 * 4 + 12, 8 * 16, 16)
    assert found.best_metric == 1 and not found.failed


def test_larger_is_better():
    found = played({**ASHA, "smaller_is_better": False}, smaller_is_better=False, curve=each_worse())
    assert found.best_metric == -1 and found.rungs[0] == RungCount(1, 4, 8, 7)


def test_random_search_spends_all():
    found = played({"name": "random", "metric": "loss", "max_trials": 5, "max_concurrent_trials": 2}, period=5)
    assert (found.trials, found.spent, found.whole, found.elapsed) == (5, 80, 80, 48)
    assert found.rungs == (RungCount(1, 16, 5, 0),)


def test_pruned_points_cost_nothing_and_are_counted():
    found = played(
        {"name": "random", "metric": "loss", "max_trials": 5},
        invalid=lambda hparams: "too high" if hparams["lr"] > 0.01 else None,
    )
    assert found.trials == 4 and found.spent == 64 and found.pruned == {"too high": 1}
    assert found.best is not None and found.best["lr"] <= 0.01


def test_nothing_valid():
    found = played({"name": "random", "metric": "loss", "max_trials": 5}, invalid=lambda hparams: "never")
    assert (found.trials, found.spent, found.best, found.failed) == (0, 0, None, True)


@pytest.mark.parametrize("mode", ["aggressive", "standard", "conservative"])
def test_it_is_deterministic_and_cheaper(mode: str):
    config = {**ASHA, "max_trials": 64, "mode": mode}
    found = played(config)
    assert found == played(config)
    assert found.trials == 64 and found.spent < found.whole
