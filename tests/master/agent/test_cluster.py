"""A manager on an engine without machines: what it submits, what it reports, how jobs end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent import cluster as subject
from zero_trial.master.agent.cluster import (
    ClusterJob,
    ClusterManager,
    JobEnd,
    JobStatus,
    cancel_all,
    left_behind,
    outcome,
    why_not_begun,
)
from zero_trial.master.agent.environment import StartOrder
from zero_trial.master.agent.resources import (
    EngineBusy,
    Exit,
    Node,
    acquire_lease,
    exit_of,
    identify,
    record_exit,
)
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.logs import LogMatch
from zero_trial.master.records import Allocation, AllocationState
from zero_trial.master.serve import refuse_another_engine, require_reachable

GOOD, BAD, LATER, KILLED = Exit(0, 1), Exit(7, 2, why="it broke"), Exit(1, 3), Exit(143, 2, killed=True)
NODES = [Node(name, 2, pools=("main", "default"), cpus=cpus) for name, cpus in (("n1", 4), ("n2", 3))]


@pytest.mark.parametrize(
    ("exits", "end", "code", "killed", "why"),
    [
        ([GOOD, GOOD], JobEnd.DONE, 0, False, ""),
        ([LATER, BAD], JobEnd.FAILED, 7, False, "it broke"),  # the first cause
        ([KILLED, BAD], JobEnd.CANCELED, 7, False, "it broke"),  # the manager has ended the peer
        ([KILLED, KILLED], JobEnd.CANCELED, 143, True, ""),
        ([BAD, None], JobEnd.NODE_LOST, 137, True, "a machine was lost (n1, n2)"),  # explains its peer
        ([None], JobEnd.PREEMPTED, 137, True, "preempted"),
        ([None], JobEnd.TIME_LIMIT, 137, False, "time limit"),
        ([KILLED], JobEnd.TIME_LIMIT, 137, False, "time limit"),
        ([None], JobEnd.OUT_OF_MEMORY, 137, False, "memory"),
        ([None], JobEnd.CANCELED, 137, True, "canceled"),
        ([None], JobEnd.FAILED, 137, False, "the supervisor no longer exists"),
        ([None], JobEnd.UNKNOWN, 137, False, "no longer knows"),
        ([GOOD, None], JobEnd.UNKNOWN, 137, False, "no longer knows"),
        ([BAD, None], JobEnd.UNKNOWN, 7, False, "it broke"),
        ([GOOD], JobEnd.UNKNOWN, 0, False, ""),
        ([GOOD, GOOD], JobEnd.NODE_LOST, 0, False, ""),  # lost after its end
        ([GOOD], JobEnd.PREEMPTED, 0, False, ""),
        ([GOOD], JobEnd.TIME_LIMIT, 0, False, ""),
        ([GOOD, None], JobEnd.NODE_LOST, 137, True, "a machine was lost"),
        ([GOOD, KILLED], JobEnd.PREEMPTED, 137, True, "preempted"),
        ([], JobEnd.UNKNOWN, 137, True, "before it started"),
    ],
)
def test_why_an_allocation_has_ended(exits: list[Exit | None], end: JobEnd, code: int, killed: bool, why: str) -> None:
    found = outcome(exits, JobStatus(("n1", "n2"), end), 9.0)
    assert (found.code, found.killed) == (code, killed) and why in found.why
    # of an earlier master: an unknown job may have been canceled, preempted or lost
    adopted = outcome(exits, JobStatus((), end), 9.0, adopted=True)
    assert (adopted.code, adopted.killed) == (code, killed or (end is JobEnd.UNKNOWN and "no longer knows" in why))


@pytest.mark.parametrize(
    ("last", "now", "left", "refused"),
    [
        ("", "", ["a"], False),
        ("slurm", "slurm", ["a"], False),
        ("ray=h:1", "ray=h:2", ["a"], False),  # a new head has a new address
        ("slurm", "", [], False),
        ("", "slurm", [], False),
        ("slurm", "", ["a"], True),  # as the guide's own `up --env` after a dead master
        ("slurm", "ray", ["a"], True),
        ("", "slurm", ["a"], True),
    ],
)
def test_another_engine_is_refused_while_runs_go_on(last: str, now: str, left: list[str], refused: bool) -> None:
    with pytest.raises(ConfigError, match="--on") if refused else contextlib.nullcontext():
        refuse_another_engine(last, now, left)


class FakeEngine:
    """Jobs that are moved by hand."""

    name, seconds, remote = "slurm", 0.01, True

    def __init__(self) -> None:
        self.machines = NODES
        self.jobs: dict[str, ClusterJob] = {}
        self.status: dict[str, JobStatus] = {}
        self.canceled: list[tuple[str, bool]] = []
        self.ends = False  # whether a job ends when it is canceled, or is moved by hand
        self.deaf: list[str] = []  # jobs that end only by force
        self.refuses: Exception | None = None
        self.keeps: dict[str, Exception] = {}  # jobs that it does not cancel

    def nodes(self) -> list[Node]:
        return self.machines

    def pools(self) -> tuple[str, ...]:
        return ("main", "default")

    def check(self, config: Mapping[str, Any]) -> None:
        if "slots_per_node" in config.get("slurm", {}):
            raise ConfigError("not here", where="slurm.slots_per_node")

    def submit(self, job: ClusterJob) -> None:
        if self.refuses:
            raise self.refuses
        assert job.name not in self.jobs
        self.jobs[job.name] = job
        self.status[job.name] = JobStatus(why="Resources")

    def cancel(self, name: str, *, force: bool = False) -> None:
        self.canceled.append((name, force))
        if name in self.keeps:
            raise self.keeps[name]
        if self.ends and name in self.status and (force or name not in self.deaf):
            self.status[name] = JobStatus(self.status[name].nodes, JobEnd.CANCELED)

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        return {name: self.status[name] for name in names if name in self.status}

    def close(self) -> None: ...


class Field:
    """A master's folder, managers on it one after the other, and what they report."""

    def __init__(self, root: Path) -> None:
        self.home = MasterDirectory(root)
        self.home.prepare()
        self.engine = FakeEngine()
        self.said: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.manager = self.open()

    def open(self) -> ClusterManager:
        self.manager = ClusterManager(self.home, self.engine, host_env=os.environ)
        self.manager.begin(self)
        return self.manager

    def on_nodes_changed(self) -> None:
        self.said.put(("nodes",))

    def on_waiting(self, name: str, why: str) -> None:
        self.said.put(("waiting", why))

    def on_started(self, name: str, nodes: Sequence[str] = ()) -> None:
        self.said.put(("started", *nodes))

    def on_matched(self, name: str, match: LogMatch) -> None:
        self.said.put(("matched", match.line))

    def on_exited(self, name: str, ended: Exit) -> None:
        self.said.put(("exited", ended.code, ended.killed, ended.why))

    def order(self, *slots: int, nodes: int = 1, **config: Any) -> StartOrder:
        run = Allocation("1.t.1", 1, 1, "1.t", 1, AllocationState.STARTING, slots, 0.0, "r", "c")
        return StartOrder(run, config, {}, 0, 0, None, "ada", "secret", "http://127.0.0.1:1", "cl", nodes=nodes)

    def submit(self, *slots: int, nodes: int = 1, name: str = "1.t.1") -> None:
        """Start a run, which waits in the engine's queue."""
        order = self.order(*(slots or (0,)), nodes=nodes)
        self.manager.start(replace(order, allocation=replace(order.allocation, id=name)))
        self.expect("waiting")

    def begin(self, rank: int) -> Path:
        """The node's process takes its lease."""
        folder = self.home.allocation("1.t.1") / f"node-{rank}"
        assert acquire_lease(folder, identify(os.getpid()))
        return folder

    def expect(self, *words: object) -> tuple[Any, ...]:
        while (said := self.said.get(timeout=30))[0] == "nodes":
            pass
        assert said[: len(words)] == words
        return said


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Field]:
    monkeypatch.setattr(subject, "_LAG_SECONDS", 0.3)
    monkeypatch.setattr(subject, "_UNLISTED_SECONDS", 0.3)
    monkeypatch.setattr("zero_trial.master.agent.resources._RETRY_SECONDS", (0.02,))
    monkeypatch.setattr(subject, "_PEERS_SECONDS", 0.0)
    monkeypatch.setattr(subject, "_NODES_SECONDS", 0.05)
    made = Field(tmp_path / "root")
    yield made
    made.manager.close()


def wait(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_run_over_two_nodes_from_its_queue_to_its_end(field: Field) -> None:
    field.manager.start(replace(field.order(0, 1, 2, 3, nodes=2, slurm={"sbatch_args": ["-q"]}), avoid=("n3",)))
    field.expect("waiting", "Resources")
    job = field.engine.jobs["1.t.1"]
    assert (job.nodes, job.slots, job.kind, job.pool) == (2, 2, "cpu", "main")
    assert job.options == {"sbatch_args": ["-q"]} and job.avoid == ()  # n3 is not known
    path = job.folder / "order.json"
    order = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600 and order["env"]["DET_SESSION_TOKEN"] == "secret"
    assert (order["nodes"], order["slots"], order["threads"]) == (2, 2, 3) and "--rendezvous" not in order["command"][
        -1
    ]
    field.engine.status["1.t.1"] = JobStatus(("n2", "n1"))
    folders = [field.begin(rank) for rank in (0, 1)]
    field.expect("started", "n2", "n1")
    for folder in folders:
        record_exit(folder, GOOD)
    field.engine.status["1.t.1"] = JobStatus(("n2", "n1"), JobEnd.DONE)
    field.expect("exited", 0, False)
    wait(lambda: not path.exists())


def test_when_one_node_fails_the_job_is_canceled(field: Field) -> None:
    field.submit(0, 1, 2, 3, nodes=2)
    field.engine.status["1.t.1"] = JobStatus(("n1", "n2"))
    first = field.begin(0)
    field.expect("started")
    record_exit(first, BAD)
    wait(lambda: field.engine.canceled == [("1.t.1", False)])
    field.engine.status["1.t.1"] = JobStatus(("n1", "n2"), JobEnd.CANCELED)
    field.expect("exited", 7, False, "it broke")


def test_the_next_manager_adopts_a_job_and_starts_none_twice(field: Field) -> None:
    assert not field.manager.adopt("1.t.1")
    field.submit()
    field.manager.close()
    field.open()
    assert field.manager.adopt("1.t.1")
    field.manager.start(field.order(0))  # FakeEngine refuses a second one of the name
    field.expect("waiting")
    field.engine.status["1.t.1"] = JobStatus(("n1",), JobEnd.NODE_LOST)
    field.expect("exited", 137, True)


def test_a_master_that_died_between_submitting_and_its_note(field: Field) -> None:
    field.engine.status["1.t.1"] = JobStatus(why="Resources")  # the engine has the job
    field.manager.start(field.order(0))
    field.expect("waiting", "Resources")
    assert field.engine.jobs == {}


def test_a_run_that_is_killed_before_it_began_is_never_submitted(field: Field) -> None:
    field.manager.kill("1.t.1")
    field.expect("exited", 137, True)
    field.manager.start(field.order(0))
    field.expect("exited", 137, True)
    assert field.engine.jobs == {}


def test_what_the_engine_refuses_is_the_end_of_the_run_and_in_its_log(field: Field) -> None:
    field.engine.refuses = MasterError("sbatch: error: invalid account")
    field.manager.start(field.order(0))
    assert "invalid account" in field.expect("exited", 127, False)[3]
    assert "invalid account" in "".join(path.read_text() for path in field.home.trial_logs(1).glob("*"))


@pytest.mark.parametrize(
    ("printed", "status", "said"),
    [
        ("srun: error: n1\n\n", JobStatus(("n1",), JobEnd.FAILED, "Slurm: FAILED"), "srun: error: n1"),
        (
            "warning\nerror   n2: it is not shared\nsrun: Terminated\n",
            JobStatus(("n1", "n2"), JobEnd.FAILED),
            "n2: it is not shared",
        ),
        ("", JobStatus((), JobEnd.FAILED, "Slurm: FAILED"), "Slurm: FAILED"),
        (None, JobStatus(("n1",), JobEnd.FAILED, "Slurm: FAILED"), "Slurm: FAILED; nothing was written to "),
        (None, JobStatus(("n1", "n2"), JobEnd.FAILED), "folder shared with n1, n2, at the same path?"),
    ],
)
def test_why_a_job_could_not_begin(tmp_path: Path, printed: str | None, status: JobStatus, said: str) -> None:
    if printed is not None:
        (tmp_path / "job.out").write_text(printed)
    found = why_not_begun(tmp_path, status)
    assert said in found and "Terminated" not in found


@pytest.mark.parametrize("end", [JobEnd.CANCELED, JobEnd.FAILED])
def test_a_job_that_ends_before_its_node_has_begun(field: Field, monkeypatch: pytest.MonkeyPatch, end: JobEnd) -> None:
    """Its end is known at once: no record can come from a node that can no longer begin."""
    monkeypatch.setattr(subject, "_LAG_SECONDS", 1000.0)
    field.submit()
    field.engine.status["1.t.1"] = JobStatus(("n1",), end)
    field.expect("exited")
    assert not acquire_lease(field.home.allocation("1.t.1") / "node-0", identify(os.getpid()))


def test_a_job_that_cannot_be_canceled_now_is_canceled_later(field: Field) -> None:
    field.submit()
    field.engine.keeps = {"1.t.1": EngineBusy("Unable to contact slurm controller")}
    field.manager.kill("1.t.1")
    wait(lambda: len(field.engine.canceled) > 1)
    field.engine.ends, field.engine.keeps = True, {}
    field.expect("exited", 137, True)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({}, ""),
        ({"slurm": {"sbatch_args": ["-q"]}, "pbs": {"pbsbatch_args": []}}, ""),
        ({"slurm": {"slots_per_node": 2}}, "slurm.slots_per_node"),
        ({"log_policies": [{"pattern": "x", "action": "exclude_node"}]}, "log_policies"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(field: Field, config: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        field.manager.check(config)


def test_a_supervisor_that_is_gone_with_its_machine(field: Field) -> None:
    field.submit()
    field.begin(0)
    field.engine.status["1.t.1"] = JobStatus(("n1",))
    field.expect("started")
    field.engine.machines = [Node("n1", 2, up=False), Node("n2", 2)]
    wait(lambda: not field.manager.nodes()[0].up)
    field.engine.status["1.t.1"] = JobStatus(("n1",), JobEnd.FAILED)
    field.expect("exited", 137, True)


def test_machines_that_come_and_go(field: Field) -> None:
    field.engine.machines = [Node("n2", 2), Node("n3", 1)]
    wait(lambda: len(field.manager.nodes()) == 3)
    found = {node.name: (node.first, node.up) for node in field.manager.nodes()}
    assert found == {"n1": (0, False), "n2": (2, True), "n3": (4, True)}
    field.manager.close()
    again = {node.name: (node.first, node.up) for node in field.open().nodes()}
    assert again == found


@pytest.mark.parametrize(
    "fault", [EngineBusy("QOSMaxSubmitJobPerUserLimit"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_run_that_cannot_be_submitted_now_waits(field: Field, fault: Exception) -> None:
    field.engine.refuses = fault
    field.manager.start(field.order(0))
    assert str(fault) in field.expect("waiting")[1]
    field.engine.refuses = None
    field.expect("waiting", "Resources")
    assert list(field.engine.jobs) == ["1.t.1"]


def test_a_run_that_is_killed_while_it_cannot_be_submitted(field: Field) -> None:
    field.engine.refuses = EngineBusy("Unable to contact slurm controller")
    field.submit()
    field.manager.kill("1.t.1")
    field.expect("exited", 137, True)
    field.engine.refuses = None
    wait(lambda: ("1.t.1", True) in field.engine.canceled)  # sbatch may have been heard
    wait(lambda: not field.manager._orders._newest)  # it is not tried again
    assert field.engine.jobs == {}


def test_a_full_disk_that_cannot_hold_the_reason_either(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    full = iter([True, True])

    def append(*_: object) -> None:
        if next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("zero_trial.master.logs.append", append)
    field.engine.refuses = MasterError("invalid account")
    field.submit()
    field.expect("exited", 127, False)


def test_a_note_that_was_lost_in_a_power_cut(field: Field) -> None:
    field.submit(0, 1, 2, 3, nodes=2)
    field.manager.close()
    (field.home.allocation("1.t.1") / "submitted.json").write_text("")
    field.open()
    assert field.manager.adopt("1.t.1")
    folders = [field.begin(rank) for rank in (0, 1)]
    field.engine.status["1.t.1"] = JobStatus(("n1", "n2"), JobEnd.DONE)
    for folder in folders:
        record_exit(folder, GOOD)
    assert field.expect("started") and field.expect("exited", 0, False)


def test_a_job_that_is_gone_for_a_moment_is_given_the_whole_time_again(field: Field) -> None:
    entry, gone, there = subject._Watched(1, 0.0), JobStatus(("n1",), JobEnd.UNKNOWN), JobStatus(("n1",))
    node = Path("none")
    assert field.manager._ended(node, entry, gone, [node]) is None and entry.ended_at is not None
    assert field.manager._ended(node, entry, there, [node]) is None and entry.ended_at is None


def test_down_ends_jobs_that_a_killed_master_left_behind(
    field: Field, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By force where they do not hear, and each whatever becomes of the others."""
    monkeypatch.setattr(subject, "_STUCK_SECONDS", 0.02)
    names = ["1.a.1", "1.b.1", "1.c.1"]
    for name in names:
        field.submit(name=name)
    field.manager.close()
    assert cancel_all(field.home, field.engine, 0.3, 0.02) == ([], names)  # they are moved by hand
    assert left_behind(field.home) == names and ("1.a.1", True) in field.engine.canceled
    field.engine.ends, field.engine.deaf = True, ["1.b.1"]
    field.engine.keeps = {"1.a.1": MasterError("scancel: Access denied")}
    plain, statuses, silent = record_exit, FakeEngine.statuses, iter([False, True, False, True])

    def full(folder: Path, ended: Exit) -> None:
        if folder == field.home.allocation("1.c.1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(folder, ended)

    def answer(engine: FakeEngine, names: Collection[str]) -> Mapping[str, JobStatus]:
        if next(silent, False):
            raise EngineBusy("squeue did not answer")
        return statuses(engine, names)

    for name in ("forbid", "record_exit"):
        monkeypatch.setattr(f"zero_trial.master.agent.resources.{name}", full)
    monkeypatch.setattr(FakeEngine, "statuses", answer)
    assert cancel_all(field.home, field.engine, 1.0, 0.02) == (["1.b.1"], ["1.a.1", "1.c.1"])
    assert left_behind(field.home) == ["1.a.1", "1.c.1"]
    assert "Access denied" in caplog.text and "No space left" in caplog.text
    recorded = exit_of(field.home.allocation("1.b.1"))
    assert recorded is not None and recorded.killed  # for a next master on any engine


def test_down_keeps_the_end_of_a_run_that_had_ended_before(field: Field) -> None:
    field.submit()
    field.manager.close()
    record_exit(field.begin(0), GOOD)
    field.engine.status.clear()  # purged
    assert cancel_all(field.home, field.engine) == ([], [])
    ended = exit_of(field.home.allocation("1.t.1"))
    assert ended is not None and (ended.code, ended.killed) == (0, False)
    field.open()
    assert field.manager.adopt("1.t.1")
    field.expect("started")
    field.expect("exited", 0, False)


def test_a_master_on_loopback_serves_machines_of_its_own_only() -> None:
    require_reachable("127.0.0.1", [Node("n1", 2, address="127.0.0.1"), Node("n2", 2, up=False, address="192.0.2.7")])
    require_reachable("10.0.0.1", [Node("n2", 2, address="192.0.2.7")])
    with pytest.raises(ConfigError, match="--host"):
        require_reachable("127.0.0.1", [Node("n2", 2, address="192.0.2.7")])
