"""One process per run's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.runs.layout import lock_run

HOLD = """
import sys, pathlib
from zero_trial.runs.layout import lock_run
with lock_run(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_one_is_told_who_holds_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"Wait for process {other.pid}"), lock_run(tmp_path):
            pass
        other.kill()
    with lock_run(tmp_path):  # the holder is gone, whatever it left
        pass


def test_it_is_let_go_at_the_end_also_of_one_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_run(tmp_path):
        raise ZeroDivisionError
    with lock_run(tmp_path), pytest.raises(ConfigError, match="another process"), lock_run(tmp_path):
        pass
    with lock_run(tmp_path / "not there"):
        pass
