"""The command line of a rank."""

from __future__ import annotations

import sys

from zero_trial.launch.supervisor import HostRanks, RankProgram


def test_a_module_on_two_ranks():
    command = HostRanks(RankProgram("zero_trial.run", ("model_def:MyTrial",), "module"), 2, "/r", cwd="/m")
    guard = [sys.executable, "-m", "zero_trial.launch.guard", "--parent", "7", "--run-dir", "/r", "--cwd", "/m"]
    assert command.argv(7) == [*guard, "-m", "zero_trial.run", "model_def:MyTrial"]


def test_scripts_and_programs():
    assert RankProgram("a.py", ("--x",)).guarded() == ["a.py", "--x"]
    assert RankProgram("nvidia-smi", (), "program").guarded() == ["--exec", "nvidia-smi"]
    assert "--inject-local-rank" in HostRanks(RankProgram("a.py", local_rank=True), 1, "/r").argv(1)
