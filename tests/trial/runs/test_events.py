"""A run's files are appended whole or replaced whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_trial.errors import Diverged, StorageError
from zero_trial.trial.runs.events import Tail, append_line, json_lines, keep_lines, read_lines, write_json
from zero_trial.trial.runs.rank_records import error_record
from zero_trial.trial.runs.run_layout import RunFolder


def test_lines_are_appended_and_read_back(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events
    append_line(path, {"kind": "start"})
    append_line(path, {"kind": "train", "loss": 0.1})
    assert read_lines(path) == [{"kind": "start"}, {"kind": "train", "loss": 0.1}]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    assert read_lines(path) == [{"a": 1}]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "nothing") == []


def test_json_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


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


def test_an_error_keeps_its_exit_code() -> None:
    error = Diverged("the loss is nan", where="rank 1, step 7")
    record = error_record(error, rank=1, message=str(error), step=7)
    assert (record.type, record.exit_code, record.rank, record.step) == ("Diverged", 4, 1, 7)
    assert record.message == "rank 1, step 7: the loss is nan." and record.expected and record.time > 0


def test_an_unexpected_error_is_named_with_its_type() -> None:
    record = error_record(KeyError("x"), rank=0, message="KeyError: 'x'")
    assert (record.type, record.exit_code, record.expected, record.step) == ("KeyError", 1, False, None)


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


def test_the_rest_is_an_unfinished_line(tmp_path: Path):
    path = tmp_path / "log"
    append(path, "a\nb")
    tail = Tail(path)
    assert list(tail.lines()) == ["a"]
    assert tail.rest() == "b"


def test_what_was_there_before_can_be_passed_over(tmp_path: Path):
    path = tmp_path / "log"
    append(path, "old\n")
    tail = Tail(path, skip_existing=True)
    append(path, "new\n")
    assert list(tail.lines()) == ["new"]


def test_lines_that_are_no_objects_are_passed_over():
    assert list(json_lines(['{"a": 1}', "nonsense", "[1]", "[" * 5000, ""])) == [{"a": 1}]
