"""Two hosts: two network namespaces joined by a cable, each with its own command; or two
supervisors on this host."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from tests.launch.programs import (
    LIMIT,
    QUICK,
    Silent,
    Unbroken,
    child_environment,
    read_summary,
    write_program,
    write_project,
)
from tests.support.pool import free_port
from zero_trial.errors import MeshError
from zero_trial.launch.hosts import RendezvousSpec
from zero_trial.launch.supervisor import MARK, HostRanks, LaunchResult, RankProgram, Supervisor
from zero_trial.util.process_tree import marked

# Both namespaces have a loopback of their own, so ranks that tried to meet there would never find
# each other.
SCRIPT = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "over", os.environ["GLOO_SOCKET_IFNAME"], "sum", int(total), flush=True)
if os.environ.get("FAIL") == str(dist.get_rank()):
    raise ValueError("boom")
dist.barrier()
dist.destroy_process_group()  # else gloo's threads may end the process on a busy machine
"""

ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Names of two connected namespaces; skips where they cannot be made, with the system's own
    reason."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the program ip")
    names = (f"zt-a-{os.getpid()}", f"zt-b-{os.getpid()}")
    cables = (f"zta{os.getpid()}", f"ztb{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except OSError as reason:
        pytest.skip(f"network namespaces are not allowed here: {reason}")
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                ip("netns", "delete", name)


def run_both(
    namespaces: tuple[str, str], folder: Path, verb: str, *arguments: str, **env: str
) -> list[tuple[int, str, str]]:
    """Each host's own command, in its namespace; exit code, output and errors of each."""
    full = {name: value for name, value in child_environment().items() if name != "GLOO_SOCKET_IFNAME"}
    hosts = []
    for node, namespace in enumerate(namespaces):
        words = ["ip", "netns", "exec", namespace, sys.executable, "-m", "zero_trial.cli.main", verb, "--slots", "1"]
        words += ["--nnodes", "2", "--node_rank", str(node), "--master_addr", ADDRESSES[0], "--master_port", "29611"]
        words += [argument.format(node=node) for argument in arguments]
        pipe = subprocess.PIPE
        hosts.append(subprocess.Popen(words, cwd=folder, env={**full, **env}, stdout=pipe, stderr=pipe, text=True))
    try:
        texts = [host.communicate(timeout=LIMIT) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    return [(host.returncode, *text) for host, text in zip(hosts, texts, strict=True)]


@pytest.mark.smoke
def test_ranks_meet_across_hosts_and_a_failure_on_one_ends_the_other(namespaces: tuple[str, str], tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (first, second) = run_both(namespaces, tmp_path, "launch", "--run-dir", "run-{node}", "train.py", FAIL="1")
    # only the host of rank 0 shows what its rank prints; the other has it in its log
    assert first[1].startswith(f"rank 0 of 2 over zta{os.getpid()} sum 3\n") and second[1] == ""
    log = (tmp_path / "run-1/logs/rank-1.log").read_text()
    assert log.startswith(f"rank 1 of 2 over ztb{os.getpid()} sum 3\n")
    assert second[0] == 1 and "rank 1: ValueError: boom" in second[2]
    assert first[0] != 0 and "Traceback" not in first[1] + first[2]
    assert first[2].startswith("failed  rank 0: ") and "(the cause may be on another host)" in first[2]


def test_a_trial_on_two_hosts_is_the_same_as_on_one(namespaces: tuple[str, str], tmp_path: Path, unbroken: Unbroken):
    """The run's folder is shared, as over a network file system; the result is that of two ranks on
    one host, bit for bit."""
    write_project(tmp_path)
    (first, second) = run_both(namespaces, tmp_path, "run", "--run-dir", "two", "const.yaml", "model")
    assert (first[0], first[2], second) == (0, "", (0, second[1], ""))
    assert "2 ranks · ZeRO-2" in first[1]
    together = read_summary(tmp_path / "two")
    assert (together["final_validation"], together["ranks"]) == (unbroken.summary["final_validation"], 2)


PLACE = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
print(*(os.environ[name] for name in names), flush=True)
"""


class LetsTheOtherHostEnd(Silent):
    """Lets the other host's rank end a while after this host's ranks have ended."""

    job: Supervisor

    def tick(self) -> None:
        self.ticks += not marked(MARK, self.job.mark)
        if self.ticks == 10:
            (self.job.run_dir.parent / "go").touch()


def hosts(folder: Path, body: str, where: list[RendezvousSpec], ranks: list[int]) -> list[Supervisor]:
    """One supervisor per host, each with its number of ranks and a folder of its own."""
    program = RankProgram(str(write_program(folder, body)))
    jobs = []
    for node, (spec, count) in enumerate(zip(where, ranks, strict=True)):
        (folder / f"run-{node}").mkdir()
        command = HostRanks(program, count, str(folder / f"run-{node}"), spec, cwd=str(folder))
        jobs.append(Supervisor(command, child_environment(), Silent(), timeouts=QUICK))
    return jobs


def run_all(jobs: list[Supervisor]) -> list[LaunchResult]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(Supervisor.run, jobs, timeout=LIMIT))


@pytest.mark.parametrize("elastic", [False, True])
def test_hosts_with_different_numbers_of_ranks(elastic: bool, tmp_path: Path):
    """Whether their order is given, or left to torch's rendezvous."""
    port = free_port()
    where = [RendezvousSpec("2", node, "127.0.0.1", port) for node in (0, 1)]
    if elastic:
        where = [RendezvousSpec("2:2", endpoint=f"127.0.0.1:{port}", run_id="test")] * 2
    jobs = hosts(tmp_path, PLACE, where, [1, 2])
    assert run_all(jobs) == [LaunchResult(0)] * 2
    said = [path.read_text().split() for path in tmp_path.glob("run-*/logs/rank-*.log")]
    assert sorted(line[0] for line in said) == ["0", "1", "2"]
    assert {line[2] for line in said} == {"3"} and len({line[6] for line in said}) == 1
    assert {(line[1], line[3]) for line in said} == {("0", "1"), ("0", "2"), ("1", "2")}
    assert {(line[4], line[5]) for line in said} == {("0", "2"), ("1", "2")}


def test_a_host_that_is_done_waits_for_the_other(tmp_path: Path):
    """Its rank leaves by ``os._exit(0)``; it keeps the store that the other host's rank may use."""
    body = """
    if rank == 0:
        os._exit(0)
    import torch.distributed
    while not os.path.exists("go"):
        threading.Event().wait(0.05)
    torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False).set("a", "b")
    """
    port = free_port()
    jobs = hosts(tmp_path, body, [RendezvousSpec("2", node, "127.0.0.1", port) for node in (0, 1)], [1, 1])
    jobs[0].watcher = watcher = LetsTheOtherHostEnd()
    watcher.job = jobs[0]
    assert run_all(jobs) == [LaunchResult(0), LaunchResult(0)]


def test_hosts_that_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zero_trial.launch.meeting._JOIN_SECONDS", 1)
    (job,) = hosts(tmp_path, "", [RendezvousSpec("2", 1, "127.0.0.1", free_port())], [1])
    with pytest.raises(MeshError, match=r"did not find each other.* expected 2 hosts within 1 s"):
        job.run()


@pytest.mark.slow
def test_a_host_that_joins_later_lets_all_ranks_meet_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # how long torch waits for further hosts once the fewest are there: by default half a minute
    monkeypatch.setitem(RendezvousTimeout._DEFAULT_TIMEOUTS, "last_call", timedelta(seconds=1))
    body = """
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    import torch.distributed
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_world_size() == 1:
        wait()
    torch.distributed.barrier()
    """
    where = RendezvousSpec("1:2", endpoint=f"127.0.0.1:{free_port()}", run_id="test")
    jobs = hosts(tmp_path, body, [where, where], [1, 1])
    alone = tmp_path / "run-0/logs/rank-0.log"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(jobs[0].run)
        while not (alone.exists() and alone.read_text()):
            threading.Event().wait(0.05)
        second = pool.submit(jobs[1].run)
        assert [first.result(LIMIT), second.result(LIMIT)] == [LaunchResult(0)] * 2
    said = [path.read_text() for path in sorted(tmp_path.glob("run-*/logs/rank-*.log"))]
    assert said == ["0 1 0\n0 2 1\n", "1 2 1\n"]
