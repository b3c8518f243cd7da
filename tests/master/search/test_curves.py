"""Synthetic learning curves."""

from __future__ import annotations

import pytest

from zero_trial.master.search.simulation import CURVES


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


def test_who_is_early_is_late_in_one_and_first_in_the_other():
    early, late = 0.1, 1.0
    for name, agrees in (("power", True), ("crossing", False)):
        curves = [CURVES[name](seed) for seed in range(40)]
        first = min(curves, key=lambda curve: curve(early))
        rank = sorted(curve(late) for curve in curves).index(first(late))
        assert (rank < 10) is agrees
