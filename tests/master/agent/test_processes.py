"""Processes by their identity, and the lease of an allocation."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zero_trial.master.agent.processes import (
    Exit,
    Identity,
    acquire_lease,
    exit_of,
    forbid,
    identify,
    lease_exists,
    lease_owner,
    never_begins,
    record_exit,
)

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        SLEEP, stdout=subprocess.PIPE, text=True, env={**os.environ, "ZT_TEST_MARK": (mark := uuid.uuid4().hex)}
    )
    made.mark = mark  # type: ignore[attr-defined]
    assert made.stdout is not None and made.stdout.readline() == "up\n"
    yield made
    made.kill()
    made.wait()


def test_a_process_is_alive_until_it_ends_even_as_a_zombie(child: subprocess.Popen[str]) -> None:
    identity = identify(child.pid)
    assert identity.alive and identity.start
    identity.send(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not identity.alive
    child.wait()
    assert not identity.alive
    identity.send(signal.SIGTERM)  # to no one


def test_a_pid_that_is_used_again_is_another_process(child: subprocess.Popen[str]) -> None:
    other = Identity(child.pid, "1")
    assert not other.alive
    other.send(signal.SIGKILL)
    assert child.poll() is None


def test_pid_0_is_no_process() -> None:
    """Pid 0 is a group to kill(2), ours."""
    for pid in (0, -1):
        assert not Identity(pid, "").alive
        Identity(pid, "").send(signal.SIGKILL)


def test_what_ran_before_the_machine_was_started_anew(child: subprocess.Popen[str]) -> None:
    identity = identify(child.pid)
    boot, _, tick = identity.start.partition(":")
    assert not identity.before_boot
    before = Identity(child.pid, f"{boot[::-1]}:{tick}")
    assert before.before_boot and not before.alive


def test_the_first_claim_holds(tmp_path: Path) -> None:
    assert not lease_exists(tmp_path) and lease_owner(tmp_path) is None
    assert acquire_lease(tmp_path, Identity(1, "2"))
    assert not acquire_lease(tmp_path, Identity(3, "4")) and not acquire_lease(tmp_path, None)
    assert lease_owner(tmp_path) == Identity(1, "2") and lease_exists(tmp_path)


def test_a_void_one_has_no_owner_ever(tmp_path: Path) -> None:
    assert acquire_lease(tmp_path, None)
    assert lease_exists(tmp_path) and lease_owner(tmp_path) is None and not acquire_lease(tmp_path, Identity(1, "2"))


def test_the_end_of_what_never_begins_appears_with_its_void_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two a watch would take it for one that was killed, and not for a failure."""
    ended, seen, plain = Exit(127, 1.0, why="no folder"), [], os.link

    def link(draft: Path, place: Path) -> None:
        plain(draft, place)
        seen.append(exit_of(tmp_path / "new"))

    monkeypatch.setattr(os, "link", link)
    assert forbid(tmp_path / "new", ended) and seen == [ended] and never_begins(tmp_path / "new")
    assert not forbid(tmp_path / "new", Exit(0, 2.0)) and exit_of(tmp_path / "new") == ended


def test_on_a_full_disk_a_lease_that_was_taken_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").mkdir()
    assert acquire_lease(tmp_path / "taken", Identity(1, "2"))

    def write_text(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    assert not acquire_lease(tmp_path / "taken", None)
    with pytest.raises(OSError, match="No space"):
        acquire_lease(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(lambda _: acquire_lease(folder, None), range(4)))  # noqa: B023
        assert won.count(True) == 1 and [path.name for path in folder.iterdir()] == ["claim.json"]


def test_an_exit_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert exit_of(tmp_path) is None
    record_exit(tmp_path, Exit(3, 5.0, killed=True, why="so"))
    assert exit_of(tmp_path) == Exit(3, 5.0, killed=True, why="so")
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_files_that_a_power_cut_left_empty_are_a_lease_without_an_owner(tmp_path: Path) -> None:
    for content in ("", '{"pid"', "\0\0\0", "3"):
        (tmp_path / "claim.json").write_text(content)
        (tmp_path / "exit.json").write_text(content)
        assert lease_exists(tmp_path) and lease_owner(tmp_path) is None and exit_of(tmp_path) is None
