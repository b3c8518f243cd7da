"""The agent with real supervisors that run small shell commands."""

from __future__ import annotations

import errno
import logging
import math
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from zero_trial.master import logs
from zero_trial.master.agent import cluster as subject
from zero_trial.master.agent import resources, storage
from zero_trial.master.agent.agent import ThisMachine
from zero_trial.master.agent.cluster import ClusterManager, cancel_all, left_behind, steps
from zero_trial.master.agent.environment import MARK, SlotDevices, StartOrder
from zero_trial.master.agent.resources import identify
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.logs import LogMatch, LogQuery
from zero_trial.master.records import Allocation, AllocationState
from zero_trial.util.process_tree import marked


class Errors(logging.Handler):
    """Puts what the agent logs as an error into a queue."""

    def __init__(self, said: queue.Queue[tuple[Any, ...]]) -> None:
        super().__init__(logging.ERROR)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put(("error", record.getMessage()))


class Field:
    """A home, agents on it one after the other, and what they say."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = MasterDirectory(root)
        self.home.prepare()
        self.said: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.patch = monkeypatch
        self.number = 0
        monkeypatch.setattr(ThisMachine, "seconds", 0.01)
        monkeypatch.setattr(resources.log, "handlers", [Errors(self.said)])
        self.refuse_next = ""  # the next report of this kind fails
        self.agent = self.open()

    def open(self) -> ClusterManager:
        self.engine = ThisMachine(self.home, SlotDevices(1, 1), host_env=os.environ)
        self.agent = ClusterManager(self.home, self.engine, grace=0.3, host_env=os.environ)
        self.agent.begin(self)
        return self.agent

    def on_nodes_changed(self) -> None: ...

    def on_waiting(self, name: str, why: str) -> None:
        self.said.put(("waiting", name, why))

    def on_started(self, name: str, nodes: Sequence[str] = ()) -> None:
        self.refuse("started")
        self.said.put(("started", name))

    def on_matched(self, name: str, match: LogMatch) -> None:
        self.said.put(("matched", name, match.policy.pattern, match.line))

    def on_exited(self, name: str, ended: resources.Exit) -> None:
        self.refuse("exited")
        self.said.put(("exited", name, ended.code, ended.why))

    def refuse(self, kind: str) -> None:
        if self.refuse_next == kind:
            self.refuse_next = ""
            raise OSError("the disk is full")

    def start(self, command: str, **config: Any) -> str:
        """Start an allocation that runs a shell command; returns its name, unique on this
        machine."""
        self.patch.setattr(subject, "steps", lambda has_hook, rendezvous: ["sh", "-c", command])
        self.number += 1
        name = f"{self.home.root.parent.name}-{os.getpid()}-{self.number}.1"
        self.agent.start(self.order(name, **config))
        return name

    def order(self, name: str, **config: Any) -> StartOrder:
        run = Allocation(name, self.number, 1, name[:-2], 1, AllocationState.STARTING, (0,), 0.0, "r", "c")
        return StartOrder(run, config, {}, 0, 0, None, "ada", "token", "http://127.0.0.1:1", "cl")

    def expect(self, *words: object) -> tuple[Any, ...]:
        said = self.said.get(timeout=60)
        assert said[: len(words)] == words
        return said

    def wait_for(self, word: str, trial: int = 1) -> str:
        source = logs.Source(self.home.trial_logs(trial), trial, "t")
        for line in logs.follow(source, LogQuery(), lambda: False):
            if line is not None and line.message.startswith(word):
                return line.message
        raise AssertionError


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Field]:
    made = Field(tmp_path / "root", monkeypatch)
    yield made
    made.agent.close()
    if left_behind(made.home):
        cancel_all(made.home, made.engine, seconds=30)


def test_from_start_to_exit_it_runs_once_and_leaves_nothing_but_how_it_ended(field: Field, tmp_path: Path) -> None:
    leftover = Path(f"/tmp/tensorboard-{tmp_path.name}-{os.getpid()}-1.1-0")
    leftover.mkdir()
    name = field.start(
        'echo "$DET_ALLOCATION_ID $DET_SESSION_TOKEN $(basename "$PWD") $C10D_PORT $TMPDIR"; touch file "$TMPDIR/file";'
        'while ! test -e stop; do sleep 0.02; done; test -d "$DET_RUN_ROOT/run/determined/info"; exit $?'
    )
    field.expect("started", name)
    _, token, work, port, temporary = field.wait_for(name).split()
    assert (token, work) == ("token", "work")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", int(port)))
    field.agent.start(field.order(name))
    (field.home.allocation(name) / "node-0" / "work" / "stop").touch()
    field.expect("exited", name, 0, "")
    field.agent.close()
    with socket.socket() as other:
        other.bind(("", int(port)))
    assert not Path(temporary).exists() and not leftover.exists()
    folder = field.home.allocation(name)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert left == ["job.out", "node-0", "node-0/claim.json", "node-0/exit.json", "submitted.json"]
    field.open()
    assert field.agent.adopt(name) and not field.agent.adopt("1.other.1")
    field.expect("started", name)
    field.expect("exited", name, 0, "")  # what ended unwatched is reported
    source = logs.Source(field.home.trial_logs(1), 1, "t")
    assert len(list(logs.lines(source, LogQuery()))) == 1


def test_kill_ends_everything(field: Field) -> None:
    name = field.start("sleep 60 & echo up; wait")
    field.expect("started", name)
    field.wait_for("up")
    field.agent.kill(name)
    said = field.expect("exited", name)
    assert said[2] in (137, 143) and marked(MARK, name) == []


def test_the_processes_of_a_killed_supervisor_end(field: Field) -> None:
    name = field.start("setsid sleep 60 & echo up $TMPDIR; wait")
    field.expect("started", name)
    temporary = Path(field.wait_for("up").split()[1])
    for _ in range(500):  # while setsid turns into sleep, its process has no mark
        if len(left := marked(MARK, name)) >= 3:
            break
        time.sleep(0.01)
    owner = resources.lease_owner(field.home.allocation(name) / "node-0")
    assert owner is not None and len(left) >= 3  # with the supervisor
    owner.send(signal.SIGKILL)
    field.expect("exited", name, 137, "the supervisor no longer exists")
    assert not any(identify(pid).alive for pid in left)
    field.agent.close()
    assert not temporary.exists()


def test_without_a_master_everything_can_be_ended(field: Field) -> None:
    name = field.start("setsid sleep 60 & echo up; wait")
    field.expect("started", name)
    field.wait_for("up")
    field.agent.close()
    assert cancel_all(field.home, field.engine, seconds=30) == ([name], [])
    assert marked(MARK, name) == [] and left_behind(field.home) == []


def on_full_disk(plain: Callable[..., Any], times: float = math.inf, only: Path | None = None) -> Callable[..., Any]:
    """What does the same as ``plain`` once a full disk (for ``only`` this path, if given) has
    refused it some times."""
    refused = 0

    def act(*arguments: Any, **options: Any) -> Any:
        nonlocal refused
        if only in (None, *arguments[:1]) and refused < times:
            refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*arguments, **options)

    return act


def test_a_run_that_is_killed_while_the_disk_is_full_never_begins(field: Field) -> None:
    field.patch.setattr(resources, "_RETRY_SECONDS", (0.02,))
    field.patch.setattr(storage, "make_scratch", on_full_disk(storage.make_scratch))
    name = field.start("true")
    field.expect("waiting", name)
    field.patch.setattr(resources, "acquire_lease", on_full_disk(resources.acquire_lease, 2))
    field.agent.kill(name)
    said = field.expect("exited", name, 137)
    assert "before it started" in said[3]


def test_a_run_that_has_begun_is_killed_on_a_full_disk(field: Field) -> None:
    def write_text(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    name = field.start("echo up; exec sleep 60")
    field.expect("started", name)
    field.wait_for("up")
    with field.patch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        field.agent.kill(name)
        field.expect("exited", name, 143)


def test_a_run_whose_supervisor_cannot_begin_ends_on_a_full_disk(field: Field) -> None:
    field.patch.setattr(resources, "never_begins", on_full_disk(resources.never_begins))
    field.patch.setattr(subject.ClusterJob, "command", ["sh", "-c", "echo no space; exit 1"])
    name = field.start("true")
    said = field.expect("exited", name, 127)
    assert "could not start: no space" in said[3]


@pytest.mark.parametrize(("has_hook", "calls"), [(False, 1), (True, 2)])
def test_the_steps_of_a_container(has_hook: bool, calls: int) -> None:
    shell, flag, script = steps(has_hook)
    assert flag == "-c" and shell.endswith("sh") and script.count("runtime.determined prepare") == calls
    assert ("startup-hook.sh" in script) == has_hook and script.endswith("exec python3 -m determined.exec.launch")


def test_a_match_is_reported_while_the_run_goes_on_and_again_to_the_next_master(field: Field) -> None:
    policies = [{"pattern": "code [78]", "action": "cancel_retries"}, {"name": "other", "pattern": "^bad$"}]
    name = field.start(
        "echo code 7; echo code 8; echo bad >&2; while ! test -e stop; do sleep 0.02; done; exit 3",
        log_policies=policies,
    )
    for master in (1, 2):
        field.expect("started", name)
        found = {field.expect("matched", name)[2:] for _ in range(2)}
        assert found == {("code [78]", "code 7"), ("^bad$", "bad")}
        if master == 1:
            field.agent.close()
            assert field.open().adopt(name)
    (field.home.allocation(name) / "node-0" / "work" / "stop").touch()
    field.expect("exited", name, 3)


@pytest.mark.parametrize("kind", ["started", "exited"])
def test_what_could_not_be_reported_is_reported_again(field: Field, kind: str) -> None:
    field.refuse_next = kind
    name = field.start("exit 3")
    for word in ("started", "exited"):
        if word == kind:
            assert "the disk is full" in field.expect("error")[1]
        field.expect(word, name)


def test_what_cannot_be_started_does_not_end_the_work(field: Field) -> None:
    field.start("true", checkpoint_storage={"type": "directory", "container_path": "/no\0such"})
    assert "null" in field.expect("exited")[3]
    field.start("true", checkpoint_storage={"type": "shared_fs", "host_path": "/dev/null/x"})
    assert "host_path" in field.expect("exited")[3] and "host_path" in field.wait_for("cannot start", 2)
    field.start("true", environment={"environment_variables": ["A=b\0c"]})
    field.expect("started")
    assert field.expect("exited")[2] == 127 and field.wait_for("cannot start", 3)
    field.start("true", checkpoint_storage={"type": "shared_fs"})  # no one foresaw these
    assert "KeyError: 'host_path'" in field.expect("exited")[3]
    field.patch.setattr(resources, "acquire_lease", lambda *_: 1 / 0)
    field.agent.kill("x.1")
    assert "ZeroDivisionError" in field.expect("error")[1]
    field.patch.undo()
    field.start("true")
    field.expect("started")
    field.expect("exited")
