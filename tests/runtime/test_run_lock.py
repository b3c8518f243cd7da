"""Two runs of one script never write into one folder, and every rank of the second is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.runs.layout import lock_run
from zero_trial.runtime.in_memory import run_ranks
from zero_trial.runtime.open import lock_run_together
from zero_trial.runtime.protocols import Distributed, JsonDistributed


def test_the_second_run_ends_on_every_rank(tmp_path: Path) -> None:
    def second(ranks: Distributed) -> None:
        with lock_run_together(tmp_path, ranks):
            raise AssertionError("two writers")

    with lock_run_together(tmp_path, JsonDistributed()):
        outcomes = run_ranks(2, second)
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert "another process is running in this folder" in str(outcome)


def test_it_is_free_when_the_block_has_ended(tmp_path: Path) -> None:
    with pytest.raises(ValueError), lock_run_together(tmp_path, JsonDistributed()):
        raise ValueError
    with lock_run(tmp_path):
        pass
