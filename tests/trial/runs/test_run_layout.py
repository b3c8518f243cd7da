"""Numbered run folders."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.trial.runs.run_layout import (
    RunFolder,
    RunStatus,
    given_run_folder,
    lock_run,
    new_run_folder,
    resumed_run_folder,
)


def test_numbers_go_up(tmp_path: Path):
    root = tmp_path / "runs"
    assert [new_run_folder(root).name for _ in range(3)] == ["0001", "0002", "0003"]
    (root / "0041").mkdir()
    (root / "mine").mkdir()
    assert new_run_folder(root).name == "0042"


def test_a_name_that_another_command_took_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    new_run_folder(tmp_path)
    with monkeypatch.context() as patch:
        # looked before the other command made 0001
        patch.setattr(Path, "iterdir", lambda self: iter(()))
        assert new_run_folder(tmp_path).name == "0002"


def test_a_given_folder(tmp_path: Path):
    assert given_run_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"a run in this folder already.*--resume"):
        given_run_folder(tmp_path / "used")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="this is a file"):
        given_run_folder(tmp_path / "file")


def test_a_resumed_folder_forgets_how_it_ended(tmp_path: Path):
    for name in (
        "errors/rank-0.json",
        "checkpoints/step-000001/metadata.json",
        "preempt",
        "summary.json",
        "events.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "summary.json").write_text('{"end": "completed"}')
    (tmp_path / "errors/rank-0.json").unlink()
    assert RunFolder(tmp_path).status() is RunStatus.COMPLETED
    resumed_run_folder(tmp_path)
    # and so it reads if it is killed now
    assert RunFolder(tmp_path).status() is RunStatus.UNFINISHED
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["checkpoints/step-000001/metadata.json", "events.jsonl"]
    with pytest.raises(ConfigError, match="nothing to resume"):
        resumed_run_folder(tmp_path / "nowhere")


def test_a_run_that_saved_nothing_can_be_resumed(tmp_path: Path):
    """What ``--run-dir`` refuses because a run has been there, ``--resume`` takes."""
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match="--resume"):
        given_run_folder(tmp_path)
    assert resumed_run_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("make", [new_run_folder, given_run_folder])
def test_a_place_where_no_folder_can_be_made(make: Callable[[Path], Path], tmp_path: Path):
    """As one that may not be written, or a full disk: said by the command, before any rank is
    started."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made \(.*/file is a file\): got .*file/deep\. Rename .*/file\."):
        make(tmp_path / "file" / "deep")


def test_a_file_or_a_dangling_link_in_place_of_the_runs(tmp_path: Path):
    """Its advice is not to look for a folder that can be written."""
    runs = tmp_path / "runs"
    runs.write_text("")
    with pytest.raises(ConfigError, match=r"runs is a file\): got .*Rename .*runs\."):
        new_run_folder(runs)
    runs.unlink()
    runs.symlink_to("nowhere")
    for folder in (runs, runs / "deep"):
        with pytest.raises(ConfigError, match=r"runs is a link to nowhere, which is no folder.*Make that folder"):
            new_run_folder(folder)
    (tmp_path / "file").write_text("")
    runs.unlink()
    runs.symlink_to("file")
    for folder in (runs, runs / "deep"):
        with pytest.raises(
            ConfigError, match=r"runs is a link to file, which is no folder\): got .*\. Remove .*/runs\.$"
        ):
            new_run_folder(folder)


HOLD = """
import sys, pathlib
from zero_trial.trial.runs.run_layout import lock_run
with lock_run(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_one_gets_the_holders_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"Wait for process {other.pid} on {socket.gethostname()}"),
            lock_run(tmp_path),
        ):
            pass
        other.kill()
    with lock_run(tmp_path):  # the holder is gone, whatever it left
        pass


def test_it_is_let_go_at_the_end_also_of_one_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_run(tmp_path):
        raise ZeroDivisionError
    with lock_run(tmp_path), pytest.raises(ConfigError, match="another process"), lock_run(tmp_path):
        pass
    with lock_run(tmp_path / "not there"):
        pass
