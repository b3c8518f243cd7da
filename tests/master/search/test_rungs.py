"""Rungs and ladders."""

from __future__ import annotations

import pytest

from zero_trial.master.search.adaptive_asha import WORST, Bracket, Rung


@pytest.mark.parametrize(
    ("rungs", "divisor", "max_time", "expected"),
    [(3, 4, 100, [6, 25, 100]), (5, 4, 100, [1, 1, 6, 25, 100]), (1, 4, 7, [7]), (3, 2.5, 10, [1, 4, 10])],
)
def test_units_of_a_ladder(rungs: int, divisor: float, max_time: int, expected: list[int]):
    assert [rung.units for rung in Bracket.ladder(rungs, divisor, max_time, 8, 8).rungs] == expected


def test_a_rung_is_ascending_and_the_newcomer_stands_before_its_equals():
    rung = Rung(1)
    assert [rung.insert(metric, name) for metric, name in [(2.0, "a"), (1.0, "b"), (2.0, "c"), (3.0, "d")]] == [
        0,
        0,
        1,
        3,
    ]
    assert [name for _, name in rung.entries] == ["b", "c", "a", "d"]
    rung.remove("c")
    assert [name for _, name in rung.entries] == ["b", "a", "d"]


def test_the_best_quarter_goes_on():
    """With divisor 4 the eighth to be measured goes on as the second best, since 8 / 4 = 2 may; the seventh did not, 7 / 4 = 1."""
    bracket = Bracket.ladder(2, 4, 8, 8, 8)
    bracket.position = dict.fromkeys("abcdefgh", 0)
    for name, metric in zip("abcdef", [1, 9, 8, 7, 6, 5], strict=True):
        assert bracket.climb(name, 2, metric) is (name != "a")
    assert bracket.climb("g", 2, 2.0)
    assert not bracket.climb("h", 2, 1.5)
    assert bracket.position["h"] == 1 and bracket.position["g"] == 0


def test_who_ends_early_is_last():
    bracket = Bracket.ladder(2, 2, 4, 4, 4)
    bracket.position = {"a": 0, "b": 0}
    bracket.drop_early("a")
    assert bracket.rungs[0].entries == [(WORST, "a")]
    assert not bracket.climb("b", 2, 1e300)


def test_state():
    bracket = Bracket.ladder(2, 2, 4, 4, 4)
    bracket.position = {"a": 0}
    bracket.climb("a", 2, 1.0)
    other = Bracket.ladder(2, 2, 4, 4, 4)
    other.take(bracket.as_json())
    assert other == bracket
