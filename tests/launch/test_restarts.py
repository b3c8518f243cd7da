"""Which ends of a run are worth another start."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.launch.first_cause import Cause
from zero_trial.launch.run_experiment import newest_step, restart_line, restart_may_help
from zero_trial.launch.supervisor import LaunchResult


@pytest.mark.parametrize(
    ("code", "before", "now", "helps"),
    [
        (5, None, 3, True),  # a rank was killed, and something is saved
        (1, 3, 6, True),  # an error that no one expected, after progress
        (5, None, None, False),  # nothing was saved
        (1, 3, 3, False),  # it fails where it failed before
        (0, None, 3, False),
        (2, None, 3, False),  # a user's mistake
        (3, None, 3, False),  # it does not fit into memory
        (4, None, 3, False),  # it diverged
        (75, None, 3, False),  # asked to stop
        (130, None, 3, False),
    ],
)
def test_a_restart_may_help(code: int, before: int | None, now: int | None, helps: bool) -> None:
    assert restart_may_help(LaunchResult(code), before, now) is helps


def test_only_finished_checkpoints_count(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None
    for name in ("step-000003", "step-000012", "step-000020.tmp-1", "step-000030"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-000003", "step-000012", "step-000020.tmp-1"):
        (tmp_path / "checkpoints" / name / "metadata.json").touch()
    assert newest_step(tmp_path) == 12


def test_the_line() -> None:
    outcome = LaunchResult(5, Cause(1, "killed by SIGKILL", 5))
    assert restart_line(outcome, 1, 5, 12) == "restart 1 of 5, from step 12: rank 1: killed by SIGKILL"
