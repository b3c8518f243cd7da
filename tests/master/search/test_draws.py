"""The random stream of a search."""

from __future__ import annotations

from zero_trial.master.search.searcher import Draws


def test_the_state_is_a_seed_and_a_count():
    draws = Draws(7)
    numbers = [draws.next().random() for _ in range(5)]
    again = Draws(**{**draws.as_json(), "drawn": 3})
    assert [again.next().random() for _ in range(2)] == numbers[3:]
    assert len(set(numbers)) == 5
    assert Draws(8).next().random() != numbers[0]


def test_the_streams_are_the_same_everywhere():
    """A restart after an upgrade of Python goes on with the same trials."""
    assert Draws(7).next().getrandbits(32) == 236563028
