"""1F1B: its picture and its prices."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, picture, report
from zero_trial.pipeline.simulate import Costs


def test_picture():
    assert picture("1f1b", 2, 3) == drawn("""
        rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
        rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .
    """)
    assert picture("1f1b", 3, 3) == drawn("""
        rank 0  F0 F1 F2 .  .  .  .  B0 -  .  B1 -  .  B2 -
        rank 1  .  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -  .  .
        rank 2  .  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .  .  .
    """)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 2), (4, 8), (5, 7)])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 2, 2), Costs(3, 1, 1)])
def test_prices(stages: int, micro_batches: int, costs: Costs):
    got = report("1f1b", stages, micro_batches, costs=costs)
    assert got.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert [rank.peak_activations for rank in got.ranks] == [
        min(stages - rank, micro_batches) for rank in range(stages)
    ]


def test_messages():
    """M over each border, forwards and backwards."""
    assert [rank.messages for rank in report("1f1b", 4, 8).ranks] == [8, 16, 16, 8]
