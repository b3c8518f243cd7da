"""ZB-V: its picture and its prices."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, picture, report


def test_picture():
    assert picture("zb_v", 2, 4) == drawn("""
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 9), (3, 6), (4, 8), (4, 16), (6, 12)])
def test_prices(stages: int, micro_batches: int):
    got = report("zb_v", stages, micro_batches)
    assert got.makespan == 6 * micro_batches + stages - 1
    assert [rank.peak_activations for rank in got.ranks] == [2 * stages] * stages
    assert sum(rank.messages for rank in got.ranks) == 2 * micro_batches * (2 * stages - 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_fewer_micro_batches_than_fill_the_pipe(stages: int, micro_batches: int):
    got = report("zb_v", stages, micro_batches)
    assert all(rank.busy == 6 * micro_batches for rank in got.ranks)
    assert max(rank.peak_activations for rank in got.ranks) <= 2 * min(stages, micro_batches)
