"""One process is its own gathering."""

from __future__ import annotations

from zero_trial.checkpoint.writer import Ranks, SingleRank


def test_alone() -> None:
    ranks: Ranks = SingleRank()
    assert (ranks.index, ranks.size) == (0, 1)
    assert ranks.gather_json({"a": 1}, "x") == [{"a": 1}]
