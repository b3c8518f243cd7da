"""The master's folder, and a run of the master in this process."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.agent.agent import ThisMachine
from zero_trial.master.agent.cluster import ClusterManager
from zero_trial.master.agent.environment import SlotDevices
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.serve import ServeOptions, serve


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A server in this process replaces them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wish(root: Path, port: int | None = None) -> ServeOptions:
    home = MasterDirectory(root)
    env = dict(os.environ)
    engine = ThisMachine(home, SlotDevices(1, 1), host_env=env)
    return ServeOptions(home, lambda: ClusterManager(home, engine, host_env=env), port)


def once(root: Path, port: int | None = None) -> int:
    """Serve, ask who is there, and end it as its user would; returns the port."""
    asked = wish(root, port)
    answers: list[int] = []

    def ready() -> None:
        with urllib.request.urlopen(f"{asked.directory.state()['url']}/info", timeout=30) as answer:
            answers.append(answer.status)
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM)).start()

    serve(asked, ready)
    assert answers == [200]
    return int(asked.directory.state()["port"])


def test_it_serves_until_it_is_asked_to_end_and_keeps_its_address(tmp_path: Path) -> None:
    port = once(tmp_path)
    assert once(tmp_path) == port
    home = MasterDirectory(tmp_path)
    assert home.state()["pid"] == 0 and not home.locked()
    assert home.log.read_text().count("stopped") == 2


def test_another_address_where_the_old_one_is_taken(tmp_path: Path) -> None:
    import socket

    port = once(tmp_path)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert once(tmp_path) != port
    assert "is in use" in MasterDirectory(tmp_path).log.read_text()


def test_one_master_for_one_folder(tmp_path: Path) -> None:
    holder = MasterDirectory(tmp_path)
    holder.prepare()
    holder.lock()
    holder.write_state({"pid": 12, "url": "http://127.0.0.1:5"})
    with pytest.raises(ConfigError, match=r"already running here.*http://127.0.0.1:5, pid 12"):
        serve(wish(tmp_path), lambda: None)
    holder.unlock()


def test_the_engine_of_jobs_that_go_on_is_kept_until_another_one_works(tmp_path: Path) -> None:
    home = MasterDirectory(tmp_path)
    home.prepare()
    home.write_state({"pid": 0, "port": 5, "on": "slurm"})
    folder = home.allocation("1.t.1")
    folder.mkdir()
    (folder / "order.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--on slurm.*master down"):
        serve(wish(tmp_path), lambda: None)
    assert home.state()["on"] == "slurm" and not home.locked()

    def fails() -> ClusterManager:
        raise ConfigError("Slurm does not answer")

    asked = ServeOptions(MasterDirectory(tmp_path), fails, None, on="slurm")
    with pytest.raises(ConfigError, match="does not answer"):
        serve(asked, lambda: None)
    asked.directory.unlock()
    assert (home.state()["on"], home.state()["port"]) == ("slurm", 5)
    (folder / "order.json").unlink()
    once(tmp_path)
    assert home.state()["on"] == ""


def test_a_master_whose_folder_is_removed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_trial.master import serve as subject

    monkeypatch.setattr(subject, "_LOOK_SECONDS", 0.02)
    root = tmp_path / "root"
    serve(wish(root), lambda: shutil.rmtree(root))
    assert not root.exists()


HOLD = """
import sys
import threading
from pathlib import Path
from zero_trial.master.directory import MasterDirectory
print(MasterDirectory(Path(sys.argv[1])).lock(), flush=True)
sys.stdin.read()
"""


def test_one_master_at_a_time_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    home = MasterDirectory(tmp_path)
    home.prepare()
    assert not MasterDirectory(tmp_path / "other").locked() and not home.locked()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "True\n"
    assert home.locked() and not home.lock()
    child.kill()
    child.wait()
    assert home.lock() and MasterDirectory(tmp_path).locked()
    home.unlock()
    assert not home.locked()


def test_it_is_its_owners_alone_and_its_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    home = MasterDirectory(tmp_path / "a" / "root")
    home.prepare()
    assert home.state() == {}
    home.write_state({"port": 5})
    assert home.state() == {"port": 5}
    file = home.root / "master.json"
    assert (stat.S_IMODE(home.root.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)
    file.write_text("half a fi")
    with pytest.raises(ConfigError, match=r"master\.json"):
        home.state()
    paths = [home.database, home.log, home.account, home.storage, home.allocation("1.t.1"), home.trial_logs(3)]
    assert all(path.is_relative_to(home.root) for path in paths) and len(set(paths)) == len(paths)


def test_a_start_waits_for_a_process_that_only_looked(tmp_path: Path) -> None:
    holder, home = MasterDirectory(tmp_path), MasterDirectory(tmp_path)
    holder.prepare()
    assert holder.lock()
    letting_go = threading.Timer(0.1, holder.unlock)
    letting_go.start()
    assert home.lock(seconds=30)
    letting_go.join()
    home.unlock()
