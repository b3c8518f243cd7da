"""The agent's command line and its log."""

from __future__ import annotations

import sys

from zero_trial.launch.agent import AgentCommand, RankExit, RankProgram, failed_ranks, tail
from zero_trial.launch.hosts import RendezvousSpec

LOG = """
W1121 02:01:08 5762 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5767 closing signal SIGTERM
E1121 02:01:08 5762 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 5768) of binary: python
Traceback (most recent call last):
Failures:
[1]:
  time      : 2026-11-21_02:01:08
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 5767)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 5768)  (SIGKILL)
"""


def test_a_module_on_two_ranks():
    command = AgentCommand(RankProgram("zero_trial.run", ("model_def:MyTrial",), "module"), 2, "/r", cwd="/m")
    guard = [sys.executable, "-m", "zero_trial.launch.guard"]
    assert command.argv(7) == [
        *(*guard, "--parent", "7", "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--log-dir", "/r/logs/agent"),
        *("--standalone", "--local-addr", "127.0.0.1"),
        *(
            "-m",
            "zero_trial.launch.guard",
            "--run-dir",
            "/r",
            "--cwd",
            "/m",
            "-m",
            "zero_trial.run",
            "model_def:MyTrial",
        ),
    ]
    assert command.log_name == "agent.log"


def test_scripts_and_programs():
    assert RankProgram("a.py", ("--x",)).guarded() == ["a.py", "--x"]
    assert RankProgram("nvidia-smi", (), "program").guarded() == ["--exec", "nvidia-smi"]
    assert "--inject-local-rank" in AgentCommand(RankProgram("a.py", local_rank=True), 1, "/r").argv(1)


def test_hosts_that_share_a_folder_have_logs_of_their_own():
    names = {AgentCommand(RankProgram("a.py"), 1, "/r", RendezvousSpec("2", k, "a")).log_name for k in (0, 1)}
    assert len(names) == 2 and "agent.log" not in names


def test_deaths_are_read_from_the_log():
    assert failed_ranks(LOG) == [RankExit(1, 5768, -9), RankExit(0, 5767, -15)]  # the first failure in front, each once
    assert failed_ranks("nothing of that kind") == []


def test_the_last_words():
    assert tail("a\n\nb\nc\n", lines=2) == ["b", "c"]
