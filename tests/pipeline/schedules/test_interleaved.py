"""Interleaved 1F1B: its picture, its prices, and micro-batches that are no multiple of the ranks."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, picture, report
from zero_trial.pipeline.generators import even_groups


def test_picture():
    assert picture("interleaved", 2, 2) == drawn("""
        rank 0  0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -
        rank 1  .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   .
    """)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 8, 3), (4, 6, 2), (3, 7, 4), (1, 5, 2)]
)
def test_prices(stages: int, micro_batches: int, chunks: int):
    got = report("interleaved", stages, micro_batches, chunks)
    group = max(map(len, even_groups(micro_batches, stages)))
    assert got.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))
    for rank, counts in enumerate(got.ranks):
        most = (chunks - 1) * group + 2 * (stages - rank - 1) + 1
        assert counts.peak_activations == min(most, chunks * micro_batches)


def test_messages():
    """v times those of 1F1B, and once more around for each further chunk."""
    assert sum(rank.messages for rank in report("interleaved", 4, 8, 2).ranks) == 2 * 8 * (4 * 2 - 1)


@pytest.mark.parametrize("micro_batches", range(1, 12))
@pytest.mark.parametrize("stages", [2, 4, 5])
def test_it_runs_with_any_number_of_micro_batches(stages: int, micro_batches: int):
    assert report("interleaved", stages, micro_batches, 3).makespan >= 3 * 3 * micro_batches


def test_groups_are_even_and_never_too_small():
    assert [list(group) for group in even_groups(7, 3)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [list(group) for group in even_groups(2, 4)] == [[0, 1]]
    assert [len(group) for group in even_groups(11, 4)] == [6, 5]
