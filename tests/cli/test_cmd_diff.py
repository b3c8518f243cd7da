"""``zero-trial diff``: 0 and ``same``, or 1 and what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.test_difference import LOCK, certificate, make, train
from zero_trial.cli.main import main

START = {"kind": "start", "step": 0}


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``a`` and ``b`` exchanged at other steps and have the same values; ``c`` has another lr and
    other code."""
    summary = {"end": "completed", "data": {"sha256": "d"}}
    make(
        tmp_path / "a",
        [START, train(1, [5.0]), train(3, [4.0, 3.0], lr=0.1)],
        certificate=certificate(m="1"),
        summary=summary,
    )
    make(tmp_path / "b", [START, train(3, [5.0, 4.0, 3.0], lr=0.1)], certificate=certificate(m="1"), summary=summary)
    lock = LOCK.replace("lr: 0.1", "lr: 0.2")
    make(
        tmp_path / "c",
        [START, train(3, [5.0, 4.5, 3.75], lr=0.2)],
        lock=lock,
        certificate=certificate(m="2"),
        summary=summary,
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_same(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "A       a  step 3, completed",
        "B       b  step 3, completed",
        "equal   loss of rank 0 (3 steps), lr (1 step)",
        "same",
    ]


def test_different(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "a", "c"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["A", "B"],
        ["setting", "hyperparameters.lr", "0.1", "0.2"],
        ["code", "m", "1", "2"],
    ]
    assert lines[5:] == [
        "differs loss of rank 0: from step 2 on, 4.0 and 4.5 (0.5 apart); equal until step 1; at most 0.75 apart, at step 3, over 3 steps",
        "differs lr: from step 3 on, 0.1 and 0.2 (0.1 apart); at the first step that both have; at most 0.1 apart, at step 3, over 1 step",
        "different from step 2 on (loss of rank 0, equal until step 1)",
    ]


def test_as_json(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "a", "c", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["same_settings"], found["same_values"]) == (False, False, False)
    assert (found["first_step"], found["first_trace"], found["ends"]) == (2, "loss of rank 0", None)
    assert found["settings"] == [{"key": "hyperparameters.lr", "a": 0.1, "b": 0.2}]
    assert found["traces"][0]["parting"]["largest"] == 0.75


def test_what_the_exit_code_is_about(two: Path) -> None:
    make(two / "d", [START, train(3, [5.0, 4.0, 3.0])], lock=LOCK.replace("lr: 0.1", "lr: 0.2"))
    assert main(["diff", "a", "d"]) == 1
    assert main(["diff", "a", "d", "--only", "values"]) == 0
    assert main(["diff", "a", "d", "--only", "settings"]) == 1
    assert main(["diff", "a", "c", "--only", "values", "--rtol", "0.6"]) == 0


def test_one_that_went_further(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(two / "short", [START, train(2, [5.0, 4.0])])
    assert main(["diff", "a", "short"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "B       short  step 2, not ended"
    assert lines[-2:] == ["ends    A at step 3, B at step 2", "different, though no value that both have differs"]


def test_mistakes(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["a", "no"], "there is no run in this folder"),
        (["a", "b", "--rtol", "2"], "not a tolerance"),
    ):
        assert main(["diff", *words]) == 2
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err
