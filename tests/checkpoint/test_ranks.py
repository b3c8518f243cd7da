"""One process is its own gathering."""

from __future__ import annotations

from zero_trial.checkpoint.ranks import Alone, Ranks


def test_alone() -> None:
    ranks: Ranks = Alone()
    assert (ranks.index, ranks.size) == (0, 1)
    assert ranks.gather_json({"a": 1}, "x") == [{"a": 1}]
