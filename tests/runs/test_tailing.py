"""Reading a file that grows."""

from __future__ import annotations

from pathlib import Path

from zero_trial.runs.events import Tail, json_lines


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_only_whole_lines_and_each_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.lines() == []  # not there yet
    append(path, "one\ntw")
    assert tail.lines() == ["one"]
    assert tail.lines() == []
    append(path, "o\nthree\n")
    assert tail.lines() == ["two", "three"]


def test_the_rest_is_an_unfinished_line(tmp_path: Path):
    path = tmp_path / "log"
    append(path, "a\nb")
    tail = Tail(path)
    assert tail.lines() == ["a"]
    assert tail.rest() == b"b"


def test_what_was_there_before_can_be_passed_over(tmp_path: Path):
    path = tmp_path / "log"
    append(path, "old\n")
    tail = Tail(path, skip_existing=True)
    append(path, "new\n")
    assert tail.lines() == ["new"]


def test_lines_that_are_no_objects_are_passed_over():
    assert json_lines(['{"a": 1}', "nonsense", "[1]", ""]) == [{"a": 1}]
