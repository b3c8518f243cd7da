"""``zero-trial master``: up, down, status and logs, with real processes."""

from __future__ import annotations

import base64
import json
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.master.fakes import experiment
from zero_trial.cli import main as cli
from zero_trial.cli.cmd_master import default_root
from zero_trial.master.agent import cluster
from zero_trial.master.agent.cluster import JobEnd, JobStatus
from zero_trial.master.agent.resources import Identity, Node
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.store import Database
from zero_trial.util.process_tree import marked


class Shell:
    """The command on one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = MasterDirectory(root)

    def run(self, word: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "zero_trial.cli.main", "master", word, "--root", str(self.root), *options]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    def up(self, *options: str) -> dict[str, Any]:
        done = self.run("up", "--cpu", "--slots", "1", "--json", *options)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def master(self) -> Identity:
        state = self.home.state()
        return Identity(state["pid"], state["start"])


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path / "root")
    yield made
    made.run("down")


def submit(env: dict[str, str], entrypoint: str) -> None:
    """Create one experiment over HTTP, as the det command would."""
    from determined.common import api
    from determined.common.api import bindings

    content = base64.b64encode(b"x").decode()
    file = bindings.v1File(path="a.txt", type=ord("0"), content=content, mtime="0", mode=0o644, uid=0, gid=0)
    session = api.Session(env["DET_MASTER"], env["DET_USER"], env["DET_USER_TOKEN"], None)
    config = yaml.safe_dump(experiment(entrypoint=entrypoint))
    body = bindings.v1CreateExperimentRequest(config=config, modelDefinition=[file], activate=True)
    bindings.post_CreateExperiment(session, body=body)


def until(condition: Any) -> None:
    tick = threading.Event()
    for _ in range(1200):
        if condition():
            return
        tick.wait(0.05)
    raise AssertionError("it did not happen")


def test_up_is_idempotent_and_down_leaves_nothing(shell: Shell) -> None:
    first = shell.up()
    assert first["started"] and set(first["env"]) == {
        *("DET_MASTER", "DET_USER", "DET_USER_TOKEN"),
        "ZERO_TRIAL_MASTER_ROOT",
    }
    again = shell.up()
    assert not again["started"] and again["pid"] == first["pid"] and again["env"] == first["env"]
    text = shell.run("up", "--port", "1").stdout
    assert f"{first['url']} (it was running already; --port not applied: down first)" in text
    for word in ("up", "status", "down"):  # each finds this master, not that of the default folder
        assert f"zero-trial master {word} --root {shell.root}" in text
    exports = dict(line.removeprefix("export ").split("=", 1) for line in shell.run("up", "--env").stdout.splitlines())
    assert {name: shlex.split(value)[0] for name, value in exports.items()} == first["env"]
    done = shell.run("up", "--foreground")
    assert done.returncode == 2 and "a master is already running here" in done.stderr and "Traceback" not in done.stderr
    (line, *_) = json.loads(shell.run("logs", "--json").stdout)["lines"]
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    address = r"http://127\.0\.0\.1:\d+"
    assert re.fullmatch(rf"{stamp} INFO zero_trial \S+ serves {address} with 1 cpu slots", line)
    assert shell.run("logs", "--tail", "1").stdout.count("\n") == 1
    assert shell.run("down").stdout == "master ended\n"
    assert not shell.home.locked() and "no master was running" in shell.run("down").stdout
    assert shell.up()["url"] == first["url"]


def test_what_is_wrong_is_reported_by_up_itself(shell: Shell) -> None:
    for words in (
        ("--on", "kubernetes"),
        ("--on", "slurm=x"),
        ("--on", "slurm", "--slots", "2"),
        ("--on", "slurm", "--cpus-per-slot", "0"),
        ("--on", "slurm", "--host", "0.0.0.0"),
        ("--cpus-per-slot", "2"),
        ("--host", "10.0.0.1"),
    ):
        assert cli.main(["master", "up", "--root", str(shell.root), *words]) == 2, words
    done = shell.run("up", "--slots", "0")
    assert done.returncode == 2 and "--slots" in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = shell.run("up", "--cpu", "--slots", "1", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 5 and "did not start" in done.stderr and "Traceback" not in done.stderr
    fix = " ".join(done.stderr.split()).rpartition(". ")[2]
    assert "master.out" in fix and "zero-trial master up" in fix


def test_trials_end_with_down_even_if_the_master_was_killed_and_go_on_after_up(shell: Shell) -> None:
    env = shell.up()["env"]
    submit(env, "touch here; exec sleep 300")

    def here(name: str) -> list[Path]:
        return list(shell.home.allocations.glob(str(Path(name, "node-0", "work", "here"))))

    until(lambda: here("*"))
    name = here("*")[0].parents[2].name
    assert marked("DET_ALLOCATION_ID", name)
    status = json.loads(shell.run("status", "--json").stdout)
    assert status["running"] and status["slots_used"] == 1 and status["experiments"][0]["trials"] == {"RUNNING": 1}
    shell.master().send(signal.SIGKILL)
    until(lambda: not shell.home.locked())
    assert re.search("the master is down", shell.run("status").stdout) and marked("DET_ALLOCATION_ID", name)
    assert f"ended allocation {name}" in shell.run("down").stdout
    assert marked("DET_ALLOCATION_ID", name) == []
    shell.up()
    until(lambda: here("*.2"))
    second = here("*.2")[0].parents[2].name
    shell.run("down")
    assert marked("DET_ALLOCATION_ID", second) == [] and not shell.home.locked()
    assert "1  ACTIVE" in shell.run("status").stdout or "QUEUED" in shell.run("status").stdout


def test_masters_that_are_absent_older_or_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status only reads, also the store of an older master, which may be running; one of another
    machine is left alone."""

    def refused(word: str, root: Path) -> str:
        assert cli.main(["master", word, "--root", str(root)]) == 2
        return capsys.readouterr().err

    for word in ("status", "logs"):
        assert "zero-trial master up" in refused(word, tmp_path / "nowhere") and not (tmp_path / "nowhere").exists()
    home = MasterDirectory(tmp_path)
    home.prepare()
    Database(home.database).close()
    with closing(sqlite3.connect(home.database)) as older:
        older.execute("PRAGMA user_version = 1")
    before = home.database.read_bytes()
    assert "an older zero_trial" in refused("status", tmp_path) and home.database.read_bytes() == before
    home.write_state({"pid": 1, "start": "another boot:1", "host": "login-2.example"})
    assert home.lock()
    try:
        assert all("login-2.example" in refused(word, tmp_path) for word in ("down", "status"))
    finally:
        home.unlock()


class _Engine:
    """Slurm with one job, which ends when it is canceled, or not at all."""

    name, seconds, remote = "slurm", 0.01, True

    def __init__(self, ends: bool) -> None:
        self.ends = ends
        self.status = JobStatus(("n1",))

    def nodes(self) -> list[Node]:
        return [Node("n1", 1)]

    def pools(self) -> tuple[str, ...]:
        return ("main",)

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        return dict.fromkeys(names, self.status)

    def cancel(self, name: str, *, force: bool = False) -> None:
        if self.ends:
            self.status = JobStatus(("n1",), JobEnd.CANCELED)

    def close(self) -> None: ...


@pytest.mark.parametrize("ends", [True, False])
def test_down_says_which_jobs_have_ended_and_which_have_not(
    tmp_path: Path, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zero_trial.cli.cmd_master._engine", lambda *_, **__: _Engine(ends))
    monkeypatch.setattr(cluster, "cancel_all", partial(cluster.cancel_all, seconds=1.0, grace=0.02))
    home = MasterDirectory(tmp_path)
    home.prepare()
    home.write_state({"pid": 0, "on": "slurm"})
    folder = home.allocation("1.t.1")
    (folder / "node-0").mkdir(parents=True)
    for name in ("order.json", "submitted.json"):
        (folder / name).write_text("{}")
    assert cli.main(["master", "down", "--root", str(tmp_path), "--json"]) == (0 if ends else 5)
    said = capsys.readouterr()
    assert json.loads(said.out)["ended_allocations"] == (["1.t.1"] if ends else [])
    assert ("1.t.1" in said.err) is not ends


def test_the_default_root_follows_the_shell_and_xdg(tmp_path: Path) -> None:
    assert default_root({"ZERO_TRIAL_MASTER_ROOT": str(tmp_path), "XDG_STATE_HOME": "/s"}) == tmp_path
    assert default_root({"XDG_STATE_HOME": "/s"}) == Path("/s/zero_trial/master")
    assert default_root({}) == Path.home() / ".local/state/zero_trial/master"
