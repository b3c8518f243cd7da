"""Numbered run folders, the run lock, and what ranks leave behind: written whole, read back, the
first error kept."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.trial.runs.run_layout import (
    ErrorRecord,
    RunFolder,
    RunStatus,
    given_run_folder,
    lock_run,
    new_run_folder,
    read_errors,
    resumed_run_folder,
    write_error,
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


@pytest.mark.parametrize("make", [new_run_folder, given_run_folder])
def test_a_place_where_no_folder_can_be_made(make: Callable[[Path], Path], tmp_path: Path):
    """Its advice is not to look for a folder that can be written."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        for folder in (tmp_path / name, tmp_path / name / "deep"):
            if (make, name, folder.name) == (given_run_folder, "file", "file"):
                continue
            with pytest.raises(ConfigError, match=rf"cannot be made \(.*/{name} is not a folder\).*Rename or remove"):
                make(folder)


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


def test_the_first_error_of_a_rank_stays(tmp_path: Path):
    first = ErrorRecord(1, "DataError", "the loader yields nothing", 2, 5.0, step=3)
    write_error(tmp_path, first)
    write_error(tmp_path, ErrorRecord(1, "RuntimeError", "later", 1, 6.0))
    (tmp_path / "errors" / ".rank-0.json.123").write_text('{"ra')  # half of a record
    assert read_errors(tmp_path) == [first]
    few = {"rank": 0, "message": "m", "expected": True, "step": None, "more": 1}
    (tmp_path / "errors" / "rank-0.json").write_text(json.dumps(few))
    assert read_errors(tmp_path) == [ErrorRecord(0, "Error", "m", 1, 0.0, expected=True), first]
