"""Two runs of one script never write into one folder, and every rank of the second is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.fronts.holding import held_together
from zero_trial.launch.held import held
from zero_trial.platform.collectives import JsonDistributed
from zero_trial.platform.in_memory import run_ranks
from zero_trial.platform.protocols import Distributed


def test_the_second_run_ends_on_every_rank(tmp_path: Path) -> None:
    def second(ranks: Distributed) -> None:
        with held_together(tmp_path, ranks):
            raise AssertionError("two writers")

    with held_together(tmp_path, JsonDistributed()):
        outcomes = run_ranks(2, second)
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert "another process is running in this folder" in str(outcome)


def test_it_is_free_when_the_block_has_ended(tmp_path: Path) -> None:
    with pytest.raises(ValueError), held_together(tmp_path, JsonDistributed()):
        raise ValueError
    with held(tmp_path):
        pass
