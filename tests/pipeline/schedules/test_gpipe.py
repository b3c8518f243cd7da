"""GPipe: its picture and its prices."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, picture, report


def test_picture():
    assert picture("gpipe", 2, 3) == drawn("""
        rank 0  F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
        rank 1  .  F0 F1 F2 B0 -  B1 -  B2 -  .  .
    """)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 2), (4, 8), (5, 7)])
def test_prices(stages: int, micro_batches: int):
    got = report("gpipe", stages, micro_batches)
    assert got.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert [rank.peak_activations for rank in got.ranks] == [micro_batches] * stages
