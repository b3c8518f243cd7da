"""Inference: its picture and its prices."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, lowered, picture, report
from zero_trial.pipeline.schedule import ActionKind


def test_picture():
    assert picture("inference", 2, 3) == drawn("""
        rank 0  F0 F1 F2 .
        rank 1  .  F0 F1 F2
    """)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(1, 1, 1), (4, 8, 1), (4, 8, 2), (3, 7, 2)])
def test_prices(stages: int, micro_batches: int, chunks: int):
    got = report("inference", stages, micro_batches, chunks)
    assert got.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))
    assert all(rank.peak_activations == 0 for rank in got.ranks)


def test_nothing_but_forwards_and_messages():
    kinds = {action.kind for row in lowered("inference", 3, 4).rows for action in row}
    assert kinds == {ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F}
