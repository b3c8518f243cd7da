"""The schedule as a value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import ChunkPlacement, Schedule, ScheduleError, parse_row


def test_it_knows_its_ranks_and_does_not_change():
    schedule = Schedule("mine", ChunkPlacement.loop(2), 1, (parse_row("0F0"), parse_row("1F0")))
    assert schedule.stages == 2
    with pytest.raises(FrozenInstanceError):
        schedule.micro_batches = 2  # type: ignore[misc]


def test_its_error_is_the_user_s():
    """Only a schedule that somebody wrote by hand can be wrong."""
    assert issubclass(ScheduleError, ConfigError) and ScheduleError.exit_code == 2
