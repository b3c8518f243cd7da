"""One rank of a simulation; whole schedules, sound and broken ones, are in test_validate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_trial.pipeline.generators import build
from zero_trial.pipeline.schedule import ScheduleError, parse_row
from zero_trial.pipeline.simulate import ALIKE, SimulatedRank, _Simulation


def rank_of(row: str, index: int = 0) -> SimulatedRank:
    """A rank of 1F1B with 2 stages and 2 micro-batches whose row is this one."""
    schedule = build("1f1b", 2, 2)
    rows = tuple(parse_row(row) if number == index else () for number in range(2))
    return SimulatedRank(index, _Simulation(replace(schedule, rows=rows), ALIKE), ALIKE.by_kind())


def test_a_rank_goes_as_far_as_it_can():
    rank = rank_of("0F0 0SEND_F0 0RECV_B0 0B0")
    assert rank.advance()
    assert str(rank.action) == "0RECV_B0"
    assert not rank.advance()
    assert rank.clock == 1
    assert rank.report.messages == 1


def test_what_is_missing_is_named():
    with pytest.raises(
        ScheduleError, match="rank 0, action 0, 0SEND_F0: what this needs has not been computed: expected 0F0"
    ):
        rank_of("0SEND_F0").advance()
    with pytest.raises(ScheduleError, match=r"the chunk is on another rank: expected one of \[0\]"):
        rank_of("1F0").advance()


def test_a_row_that_ends_too_early():
    rank = rank_of("0F0 0F1")
    rank.advance()
    with pytest.raises(ScheduleError, match="a computation is missing: expected 0B0"):
        rank.finish()
