"""The agent's command line."""

from __future__ import annotations

import sys

import pytest

from zero_trial.launch.hosts import RendezvousSpec
from zero_trial.launch.supervisor import AgentCommand, RankProgram, tail


def test_a_module_on_two_ranks():
    command = AgentCommand(RankProgram("zero_trial.run", ("model_def:MyTrial",), "module"), 2, "/r", cwd="/m")
    guard = [sys.executable, "-m", "zero_trial.launch.guard"]
    assert command.argv(7) == [
        *(
            *guard,
            "--parent",
            "7",
            "-m",
            "zero_trial.trial.runtime.elastic_agent",
            "/r/logs/agent.json",
            "0",
            "--nproc-per-node",
            "2",
        ),
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
    assert (str(command.log), str(command.record)) == ("/r/logs/agent.log", "/r/logs/agent.json")


@pytest.mark.parametrize(("platform", "forked"), [("linux", "2"), ("darwin", "0")])
def test_ranks_of_a_trial_are_forked_where_that_is_safe(monkeypatch, platform: str, forked: str):
    monkeypatch.setattr(sys, "platform", platform)
    argv = AgentCommand(RankProgram("zero_trial.run", kind="module", forked=True), 2, "/r").argv(7)
    assert argv[argv.index("/r/logs/agent.json") + 1] == forked


def test_scripts_and_programs():
    assert RankProgram("a.py", ("--x",)).guarded() == ["a.py", "--x"]
    assert RankProgram("nvidia-smi", (), "program").guarded() == ["--exec", "nvidia-smi"]
    assert "--inject-local-rank" in AgentCommand(RankProgram("a.py", local_rank=True), 1, "/r").argv(1)


def test_hosts_that_share_a_folder_have_logs_of_their_own():
    names = {AgentCommand(RankProgram("a.py"), 1, "/r", RendezvousSpec("2", k, "a")).log.name for k in (0, 1)}
    assert len(names) == 2 and "agent.log" not in names


def test_the_last_words():
    assert tail("a\n\nb\nc\n", lines=2) == ["b", "c"]
