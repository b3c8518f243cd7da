"""Tests for zero_trial/sharding/offload/swap_file.py."""

from __future__ import annotations

import pytest

from zero_trial.sharding.offload.swap_file import CUT, MOST, slot_elements


@pytest.mark.parametrize(
    ("total", "sub_group", "count", "elements"),
    [
        (1 << 30, 10**9, 4, MOST),
        (1 << 30, 100_000, 4, 24 * CUT),
        (1 << 20, 10**9, 2, 1 << 17),
        (1 << 20, 10**9, 4, 1 << 16),
        (1000, 10**9, 4, CUT),
        (1000, 1, 1, CUT),
    ],
)
def test_buffers_hold_a_quarter_at_most(total: int, sub_group: int, count: int, elements: int) -> None:
    assert slot_elements(total, sub_group, count) == elements


def test_another_limit() -> None:
    """Parameters have buffers for whole shards."""
    assert slot_elements(1 << 30, 6 * MOST, 4, 6 * MOST) == 6 * MOST
    assert slot_elements(24 * MOST, 6 * MOST, 4, 6 * MOST) == 24 * MOST // 16
