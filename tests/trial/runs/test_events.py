"""A run's files are appended whole or replaced whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import StorageError
from zero_trial.trial.runs.events import Tail, append_line, join_memory, json_lines, keep_lines, read_lines, write_json
from zero_trial.trial.runs.run_layout import RunFolder


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
