"""Looped breadth-first: its picture and its prices, with those of sharding."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, picture, report
from zero_trial.pipeline.schedule import ParameterLifetime


def test_picture():
    assert picture("looped_bfs", 2, 2) == drawn("""
        rank 0  0F0 0F1 2F0 2F1 .   .   .   2B0 -   2B1 -   0B0 -   0B1 -
        rank 1  .   1F0 1F1 3F0 3F1 3B0 -   3B1 -   1B0 -   1B1 -   .   .
    """)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 5, 3)])
def test_prices(stages: int, micro_batches: int, chunks: int):
    got = report("looped_bfs", stages, micro_batches, chunks, parameters=ParameterLifetime.CHUNK)
    assert got.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))
    for rank in got.ranks:
        assert rank.peak_activations == chunks * micro_batches
        assert rank.gathers == 2 * chunks - 1
        assert (rank.peak_parameters, rank.peak_gradients) == (1, 1)
