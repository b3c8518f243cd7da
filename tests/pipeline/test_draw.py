"""Schedules drawn as text."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, lowered, report
from zero_trial.errors import ConfigError
from zero_trial.pipeline.draw import grid, rows_as_text
from zero_trial.pipeline.simulator import Costs


def test_costs_are_columns():
    assert grid(report("1f1b", 2, 2, costs=Costs(2, 2, 1, 1))) == drawn("""
        rank 0  F0 -  F1 -  .  .  .  .  .  B0 -  -  .  .  B1 -  -
        rank 1  .  .  .  F0 -  B0 -  -  F1 -  B1 -  -  .  .  .  .
    """)
    with pytest.raises(ConfigError, match="whole numbers"):
        grid(report("1f1b", 2, 2, costs=Costs(forward=1.5)))


def test_many_ranks_and_micro_batches_stay_aligned():
    lines = grid(report("gpipe", 11, 12)).splitlines()
    assert lines[0].startswith("rank 0   F0  F1 ") and lines[10].startswith("rank 10  .   .  ")


def test_every_action():
    assert rows_as_text(lowered("1f1b", 1, 1)) == "rank 0  0F0 0B0 0REDUCE STEP"
