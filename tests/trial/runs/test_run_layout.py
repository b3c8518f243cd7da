"""The files of a run: appended or replaced whole; numbered folders, the lock, and what ranks leave
behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError, StorageError
from zero_trial.trial.runs.events import Tail, append_line, join_memory, json_lines, keep_lines, read_lines, write_json
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
    with pytest.raises(ConfigError, match=r"this folder already contains a run.*--resume"):
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
            with pytest.raises(
                ConfigError, match=rf"cannot be created \(.*/{name} is not a folder\).*Rename or remove"
            ):
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


def test_lines_are_appended_and_read_back(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events
    append_line(path, {"kind": "start"})
    append_line(path, {"kind": "train", "loss": 0.1})
    append(path, '{"a": ')  # torn: its writer was killed
    assert read_lines(path) == [{"kind": "start"}, {"kind": "train", "loss": 0.1}]
    assert read_lines(tmp_path / "nothing") == []


def test_json_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]


def test_a_disk_that_takes_no_more_is_an_error_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        write_json(tmp_path / "file" / "summary.json", {})
    monkeypatch.setattr(
        "os.write", lambda descriptor, line: len(line) // 2
    )  # what a disk does for which half a line is too much
    with pytest.raises(StorageError, match="No space left") as raised:
        append_line(tmp_path / "events.jsonl", {"kind": "start"})
    assert raised.value.exit_code == 5


def test_lines_that_do_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keep_lines(path, lambda line: False)
    assert not path.exists()
    for step in (1, 2, 3):
        append_line(path, {"step": step})
    before = path.stat().st_ino
    keep_lines(path, lambda line: line["step"] <= 3)
    assert path.stat().st_ino == before  # untouched
    with path.open("a") as file:
        file.write('{"step": ')
    keep_lines(path, lambda line: line["step"] <= 2)
    append_line(path, {"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_only_whole_lines_and_each_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert list(tail.lines()) == []  # not there yet
    append(path, "one\ntw")
    assert list(tail.lines()) == ["one"]
    assert list(tail.lines()) == []
    append(path, "o\nthree\n")
    assert list(tail.lines()) == ["two", "three"]
    new = Tail(path, skip_existing=True)
    append(path, "four\nb")
    assert list(new.lines()) == ["four"]
    assert new.rest() == "b", "an unfinished line"


def test_lines_that_are_no_objects_are_passed_over():
    assert list(json_lines(['{"a": 1}', "nonsense", "[1]", "[" * 5000, ""])) == [{"a": 1}]


PEAK, STATES, ERROR = "memory_measured_peak_bytes", "memory_measured_states_bytes", "memory_plan_error_percent"


@pytest.mark.parametrize(
    ("figures", "earlier", "joined"),
    [
        ({"step": 3}, [], {"step": 3}),
        ({PEAK: 10}, [{PEAK: 30}, {PEAK: 20}], {PEAK: 30}),
        ({PEAK: 40, STATES: 1}, [{PEAK: 30, STATES: 2}], {PEAK: 40, STATES: 2}),
        ({}, [{PEAK: 30}], {PEAK: 30}),
        ({PEAK: 10, "memory_planned_bytes": 18, ERROR: 80.0}, [{PEAK: 20}], {PEAK: 20, "memory_planned_bytes": 18, ERROR: -10.0}),
        ({"peak_memory_bytes": [5, 5]}, [{"peak_memory_bytes": [4, 9, 1]}], {"peak_memory_bytes": [5, 9, 1]}),
        ({PEAK: 10}, [{PEAK: "NaN"}, {}], {PEAK: 10}),
    ],
)  # fmt: skip
def test_memory_is_that_of_all_parts_of_a_run(figures: dict[str, Any], earlier: list[Any], joined: dict[str, Any]):
    assert join_memory(figures, earlier) == joined
