"""``zero-trial master``: up, down, status and logs, with real processes."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.master.agent.test_cluster import FakeEngine
from tests.master.det import Det, Result, until
from zero_trial.cli import main as cli
from zero_trial.cli.cmd_master import default_root
from zero_trial.master.agent import cluster
from zero_trial.master.agent.cluster import JobStatus
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.store import Database
from zero_trial.util.process_tree import marked


@pytest.fixture
def det(tmp_path: Path) -> Iterator[Det]:
    """A master with one slot, once ``up`` has started it."""
    (tmp_path / "home").mkdir()
    made = Det(tmp_path, options=("--slots", "1", "--cpu"))
    yield made
    run(made, "down")


def run(det: Det, word: str, *options: str) -> Result:
    """``zero-trial master WORD --root ...`` in a shell that has exported nothing."""
    return replace(det, exports={}).zero_trial("master", word, *options)


def test_up_is_idempotent_and_down_leaves_nothing(det: Det) -> None:
    first = det.up()
    assert first["started"] and set(first["env"]) == {
        *("DET_MASTER", "DET_USER", "DET_USER_TOKEN"),
        "ZERO_TRIAL_MASTER_ROOT",
    }
    again = det.up()
    assert not again["started"] and again["pid"] == first["pid"] and again["env"] == first["env"]
    text = run(det, "up", "--port", "1").out
    assert f"{first['url']} (was already running; --port not applied: run down first)" in text
    for word in ("up", "status", "down"):  # each finds this master, not that of the default folder
        assert f"zero-trial master {word} --root {det.root}" in text
    exports = dict(line.removeprefix("export ").split("=", 1) for line in run(det, "up", "--env").out.splitlines())
    assert {name: shlex.split(value)[0] for name, value in exports.items()} == first["env"]
    done = run(det, "up", "--foreground")
    assert done.code == 2 and "a master is already running here" in done.err and "Traceback" not in done.err
    (line, *_) = json.loads(run(det, "logs", "--json").out)["lines"]
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    address = r"http://127\.0\.0\.1:\d+"
    assert re.fullmatch(rf"{stamp} INFO zero_trial \S+ serves {address} with 1 cpu slots", line)
    assert run(det, "logs", "--tail", "1").out.count("\n") == 1
    assert run(det, "down").out == "master ended\n"
    assert not MasterDirectory(det.root).locked() and "no master was running" in run(det, "down").out
    assert det.up()["url"] == first["url"]


def test_what_is_wrong_is_reported_by_up_itself(det: Det) -> None:
    for words in (
        ("--on", "kubernetes"),
        ("--on", "slurm=x"),
        ("--on", "slurm", "--slots", "2"),
        ("--on", "slurm", "--cpus-per-slot", "0"),
        ("--on", "slurm", "--host", "0.0.0.0"),
        ("--cpus-per-slot", "2"),
        ("--host", "10.0.0.1"),
    ):
        assert cli.main(["master", "up", "--root", str(det.root), *words]) == 2, words
    done = run(det, "up", "--slots", "0")
    assert done.code == 2 and "--slots" in done.err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(det, "up", "--cpu", "--slots", "1", "--port", str(taken.getsockname()[1]))
    assert done.code == 5 and "did not start" in done.err and "Traceback" not in done.err
    fix = " ".join(done.err.split()).rpartition(". ")[2]
    assert "master.out" in fix and "zero-trial master up" in fix


def test_trials_end_with_down_even_if_the_master_was_killed_and_go_on_after_up(det: Det) -> None:
    det.up()
    det.create(entrypoint="touch here; exec sleep 300")
    home = MasterDirectory(det.root)

    def here(name: str) -> list[Path]:
        return list(home.allocations.glob(str(Path(name, "node-0", "work", "here"))))

    until(lambda: bool(here("*")), "the trial never begins")
    name = here("*")[0].parents[2].name
    assert marked("DET_ALLOCATION_ID", name)
    status = json.loads(run(det, "status", "--json").out)
    assert status["running"] and status["slots_used"] == 1 and status["experiments"][0]["trials"] == {"RUNNING": 1}
    det.kill_9()
    until(lambda: not home.locked(), "the master's folder stays locked")
    assert re.search("the master is down", run(det, "status").out) and marked("DET_ALLOCATION_ID", name)
    assert f"ended allocation {name}" in run(det, "down").out
    assert marked("DET_ALLOCATION_ID", name) == []
    det.up()
    until(lambda: bool(here("*.2")), "the trial is never started again")
    second = here("*.2")[0].parents[2].name
    run(det, "down")
    assert marked("DET_ALLOCATION_ID", second) == [] and not home.locked()
    assert "1  ACTIVE" in run(det, "status").out or "QUEUED" in run(det, "status").out


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


@pytest.mark.parametrize("ends", [True, False])
def test_down_says_which_jobs_have_ended_and_which_have_not(
    tmp_path: Path, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    engine.ends, engine.status = ends, {"1.t.1": JobStatus(("n1",))}
    monkeypatch.setattr("zero_trial.cli.cmd_master._engine", lambda *_, **__: engine)
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
