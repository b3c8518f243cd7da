"""What the agent says of failed ranks comes from torch's own structures, not from the words in its
log."""

from __future__ import annotations

import json
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zero_trial.runs.records import AgentRecord, RankExit, read_agent, write_agent
from zero_trial.runtime.agent import failures_of


def failure(tmp_path: Path, rank: int, pid: int, code: int, time: int) -> ProcessFailure:
    """A rank that left an error file of the given time."""
    path = tmp_path / f"{rank}.json"
    path.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": str(time)}}}))
    return ProcessFailure(rank, pid, code, str(path))


def test_the_first_failure_is_in_front(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, 50, -15, 9), 1: failure(tmp_path, 1, 51, -9, 7)}
    assert failures_of(ChildFailedError("run", failures)) == (RankExit(1, 51, -9), RankExit(0, 50, -15))


def test_the_record_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "logs/agent.json"
    assert read_agent(path) == AgentRecord()
    record = AgentRecord(closing=True, failures=(RankExit(1, 51, -9),))
    write_agent(path, record)
    assert read_agent(path) == record
