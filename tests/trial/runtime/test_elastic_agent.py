"""The agent: ranks that it forks are like those started by themselves, and what it says of failed
ranks comes from torch's own structures, not from the words in its log."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zero_trial.trial.runs.rank_records import AgentRecord, RankExit, read_agent, write_agent
from zero_trial.trial.runtime.elastic_agent import ForkedRank, failures_of


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


@contextmanager
def forked(run: Callable[[str], int]) -> Iterator[ForkedRank]:
    """A process that waits for its place and ends with what ``run`` returns for it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(writing)
        with os.fdopen(reading) as pipe:
            os._exit(run(pipe.read()))
    os.close(reading)
    rank = ForkedRank(pid, writing)
    yield rank
    assert rank.poll() is not None


def test_a_rank_gets_its_place_and_its_code_is_known():
    with forked(lambda place: int(json.loads(place)["RANK"])) as rank:
        assert rank.proc.poll() is None
        rank.begin({"RANK": "3"})
        assert rank.proc.wait() == 3 == rank.proc.poll()


def test_a_rank_that_is_ended_while_it_waits():
    with forked(lambda place: 0) as rank:
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.05)
        rank.close(signal.SIGKILL)
        assert rank.wait(60) == -signal.SIGKILL
        rank.begin({"RANK": "0"})  # there is no reader any more; its end is known
        rank.close()


NO_DEVICE = """
import torch
def refuse(*arguments):
    raise AssertionError("a device was asked for before the fork")
for name in ("is_available", "device_count", "init", "current_device", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
from zero_trial.trial.runtime.elastic_agent import NEEDED_BY_RANKS
for name in NEEDED_BY_RANKS:
    __import__(name)
import os
print(len(os.listdir("/proc/self/task")))
"""


def test_what_is_imported_before_the_fork_asks_no_device_and_starts_no_thread() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # of OpenMP and OpenBLAS; the latter's pool outlives a fork
    done = subprocess.run(
        [sys.executable, "-c", NO_DEVICE], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


PROBE = """
import atexit, ctypes, gzip, json, os, random, signal, sys, threading
import numpy

class Held:
    # goes when the interpreter takes its modules apart
    def __del__(self, mkdir=os.mkdir, name="torn-" + os.environ["RANK"]):
        mkdir(name)

sys.held, sys.left = Held(), open("left-" + os.environ["RANK"], "w")
sys.left.write("in a buffer")
sys.packed = gzip.open("packed-" + os.environ["RANK"], "wt")
sys.packed.write("in a buffer")
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fputs(b"in a buffer", ctypes.c_void_p(libc.fopen(b"of-c-" + os.environ["RANK"].encode(), b"w")))
atexit.register(os.mkdir, "exit-" + os.environ["RANK"])
threading.Timer(0.1, os.mkdir, ["thread-" + os.environ["RANK"]]).start()
print(json.dumps({
    "rank": os.environ["RANK"], "world": os.environ["WORLD_SIZE"], "argv": sys.argv[1:], "main": __name__,
    "draws": [random.random(), float(numpy.random.rand())], "leads": os.getpgrp() == os.getpid(),
    "parent": os.getppid(), "cwd": os.getcwd(),
}))
if sys.argv[1:] == ["fail"]:
    if os.environ["RANK"] == "0":
        open("waits", "w").close()
        signal.pause()
    while not os.path.exists("waits"):
        threading.Event().wait(0.01)
    sys.exit(7)
"""


def run_agent(folder: Path, *, forked: int, argument: str = "x") -> tuple[int, list[dict[str, object]], AgentRecord]:
    """Run the probe on two ranks; return the agent's exit code, what ranks printed, its record."""
    (folder / "probe.py").write_text(PROBE)
    guard = ["-m", "zero_trial.launch.guard"]
    agent = [
        *guard,
        "--parent",
        str(os.getpid()),
        "-m",
        "zero_trial.trial.runtime.elastic_agent",
        str(folder / "agent.json"),
    ]
    torchrun = ["--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1"]
    rank = [*guard, "--run-dir", str(folder), "--cwd", str(folder), "-m", "probe", argument]
    done = subprocess.run([sys.executable, *agent, str(forked), *torchrun, *rank], capture_output=True, timeout=120)
    logs = [(folder / f"logs/rank-{k}.log").read_text().splitlines()[0] for k in (0, 1)]
    return done.returncode, [json.loads(log) for log in logs], read_agent(folder / "agent.json")


def test_a_forked_rank_is_like_one_that_was_started_by_itself(tmp_path: Path) -> None:
    alone, other = tmp_path / "alone", tmp_path / "forked"
    alone.mkdir()
    other.mkdir()
    code, started, _ = run_agent(alone, forked=0)
    forked_code, ranks, _ = run_agent(other, forked=2)
    assert (code, forked_code) == (0, 0)
    for rank, expected in zip(ranks, started, strict=True):
        same = ("rank", "world", "argv", "main", "leads")
        assert {key: rank[key] for key in same} == {key: expected[key] for key in same}
        assert rank["cwd"] == str(other)
    assert ranks[0]["parent"] == ranks[1]["parent"]
    first, second = (rank["draws"] for rank in ranks)
    assert isinstance(first, list) and isinstance(second, list)
    assert first[0] != second[0] and first[1] != second[1]  # no two ranks share what Python and numpy draw
    for folder in (alone, other):
        for name in ("exit", "thread"):
            assert (folder / f"{name}-0").exists() and (folder / f"{name}-1").exists()
        for k in (0, 1):
            assert (folder / f"left-{k}").read_text() == (folder / f"of-c-{k}").read_text() == "in a buffer"
    packed = [gzip.decompress((other / f"packed-{k}").read_bytes()) for k in (0, 1)]
    assert packed == [b"in a buffer"] * 2, "an interpreter that takes its modules apart may leave it without its end"
    assert list(alone.glob("torn-*")) and not list(other.glob("torn-*")), "writes to pages that ranks share"


def test_the_code_of_a_forked_rank_reaches_the_record_and_whom_the_agent_ended(tmp_path: Path) -> None:
    """Rank 0 waits forever."""
    code, _, record = run_agent(tmp_path, forked=2, argument="fail")
    assert (code, record.closing) == (1, True)
    ended = {(end.local_rank, end.code, end.by_agent) for end in record.failures}
    assert ended == {(1, 7, False), (0, -signal.SIGTERM, True)}
