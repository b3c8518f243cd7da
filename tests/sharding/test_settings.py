"""Tests for zero_trial/sharding/grouping.py."""

from __future__ import annotations

from zero_trial.sharding.grouping import ShardingSettings


def test_without_overlap_every_reduction_is_waited_for_at_once() -> None:
    assert ShardingSettings().in_flight == 2
    assert ShardingSettings(overlap=False).in_flight == 0
