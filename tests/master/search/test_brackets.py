"""Brackets, computed by hand from the published rules."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.search.adaptive_asha import BracketShare, Budget, divide, rungs_by_mode


def test_sixteen_trials_in_standard_mode():
    # Rungs: min(5, log4(16) + 1, log4(16) + 1) = 3, of which standard takes (3 - 1) // 2 + 1 = 2 to 3.
    # Weights 4^2/3 = 5.33 and 4^1/2 = 2: 11.6 and 4.4 of 16 trials, and the one that is left goes to the first.
    assert divide(Budget(max_trials=16, max_time=16)) == (BracketShare(3, 12, 8), BracketShare(2, 4, 8))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # log4(64) + 1 = 4 rungs, one bracket.
        (Budget(64, 64, mode="aggressive"), [(4, 64, 16)]),
        # Weights 16/3, 4/2, 1/1 of 8.33: 10.24, 3.84, 1.92, and two are left. Sixteen at a time are 5, 5, 5 and one more for the first.
        (Budget(16, 16, mode="conservative"), [(3, 12, 6), (2, 3, 5), (1, 1, 5)]),
        # Two at a time are fewer than three brackets: one each.
        (Budget(16, 16, mode="conservative", max_concurrent_trials=2), [(3, 12, 1), (2, 3, 1), (1, 1, 1)]),
        # Zero at a time: as many as the last bracket has trials, or the divisor.
        (Budget(16, 16, mode="conservative", max_concurrent_trials=0), [(3, 12, 4), (2, 3, 4), (1, 1, 4)]),
        (Budget(100, 100, mode="aggressive", divisor=3, max_concurrent_trials=0), [(5, 100, 100)]),
        # Nothing to divide.
        (Budget(1, 1), [(1, 1, 16)]),
        (Budget(1, 1000), [(1, 1, 16)]),
        (Budget(1000, 1), [(1, 1000, 16)]),
        # Rungs given by hand are taken as they are, tallest first. Weights 4/3 and 1: 5.7 and 4.3 of 10.
        (Budget(10, 2, divisor=2, bracket_rungs=(1, 3)), [(3, 6, 8), (1, 4, 8)]),
        # max_rungs 2: standard takes 1 to 2. Weights 4/2 and 1: 6.7 and 3.3 of 10.
        (Budget(10, 100, max_rungs=2), [(2, 7, 8), (1, 3, 8)]),
        # Every bracket has a trial, even where that is more than max_trials: weights 2, 5.33 and 16 give 0, 0 and 0 of 1.
        (Budget(1, 4, bracket_rungs=(2, 3)), [(3, 1, 8), (2, 1, 8)]),
    ],
)
def test_by_hand(budget: Budget, expected: list[tuple[int, int, int]]):
    assert [(share.rungs, share.max_trials, share.max_concurrent) for share in divide(budget)] == expected


@pytest.mark.parametrize(
    ("mode", "most", "expected"),
    [
        ("aggressive", 5, [5]),
        ("standard", 5, [3, 4, 5]),
        ("standard", 4, [2, 3, 4]),
        ("standard", 1, [1]),
        ("conservative", 4, [1, 2, 3, 4]),
    ],
)
def test_modes(mode: str, most: int, expected: list[int]):
    assert rungs_by_mode(mode, most) == expected


def test_an_unknown_mode():
    with pytest.raises(ConfigError, match=r"searcher.mode: no such mode: got brave"):
        rungs_by_mode("brave", 3)
