"""``zero-trial report``, ``board`` and ``diff``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.report import samples
from tests.report.samples import play
from tests.report.test_difference import LOCK, certificate
from tests.report.test_difference import make as make_run
from tests.report.test_difference import train as train_event
from tests.report.test_run_reader import SUMMARY, make, run, start, train
from zero_trial.cli.main import main
from zero_trial.master.store import Database


def test_the_page_lies_in_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "0001", [start(0), train(4, 1.0)], summary=SUMMARY)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report  {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("verb", [("report",), ("sweep", "report")])
def test_an_experiment_of_the_master(
    verb: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(tmp_path / "master.db")
    assert main([*verb, "1", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "report  sweep-1.html\n"
    assert "<h1>small search</h1>" in (tmp_path / "sweep-1.html").read_text()


def test_what_cannot_be_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "0001", 0.1, 1.0)
    run(tmp_path / "0002", 0.1, 1.0)
    (tmp_path / "0002" / "summary.json").write_text("[]")
    assert main(["report", str(tmp_path / "0002")]) == 0
    assert capsys.readouterr().err == "warn    not in the report: summary.json: not a JSON object\n"
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "warn    not in the report: 0002/summary.json: not a JSON object\n"
    assert "sweep.html" in captured.out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "0001", [start(0)])
    (tmp_path / "empty").mkdir()
    Database(tmp_path / "empty" / "master.db").close()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for words, said in (
            (["report", str(tmp_path / "nowhere")], "this folder contains no run"),
            (["report", "1", "--root", str(tmp_path)], "master's store"),
            (["report", "1", "--root", str(tmp_path / "empty")], "no experiment exists yet: got 1"),
            (["report", str(folder), "-o", str(tmp_path / "no" / "x.html")], "cannot be written (No such file or dir"),
            (["board", str(tmp_path / "nowhere")], "nowhere"),
            (["board", str(tmp_path), "--port", "70000"], "not a port"),
            (["diff", str(folder), str(tmp_path / "nowhere")], "this folder contains no run"),
            (["diff", str(folder), str(folder), "--rtol", "2"], "not a tolerance"),
        ):
            assert main(words) == 2
            assert said in capsys.readouterr().err, words
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_it_prints_its_address_and_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    samples.run(tmp_path, "0001", 0.001, steps=200)
    words = [sys.executable, "-m", "zero_trial.cli.main", "board", str(tmp_path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, _, token = json.loads(process.stdout.readline())["board"].partition("#token=")
        request = urllib.request.Request(f"{address}/live?once=1", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b"quickstart" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


START = {"kind": "start", "step": 0}


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``a`` and ``b`` exchanged at other steps and have the same values; ``c`` has another lr and
    other code, ``d`` another lr, and ``short`` has ended earlier."""
    monkeypatch.chdir(tmp_path)
    lock, ended = LOCK.replace("lr: 0.1", "lr: 0.2"), {"end": "completed", "data": {"sha256": "d"}}
    one = {"summary": ended, "certificate": certificate(m="1")}
    make_run(Path("a"), [START, train_event(1, [5.0]), train_event(3, [4.0, 3.0], lr=0.1)], **one)
    make_run(Path("b"), [START, train_event(3, [5.0, 4.0, 3.0], lr=0.1)], **one)
    other = {"lock": lock, "summary": ended, "certificate": certificate(m="2")}
    make_run(Path("c"), [START, train_event(3, [5.0, 4.5, 3.75], lr=0.2)], **other)
    make_run(Path("d"), [START, train_event(3, [5.0, 4.0, 3.0])], lock=lock)
    make_run(Path("short"), [START, train_event(2, [5.0, 4.0])])

    def diff(*words: str, code: int) -> list[str]:
        assert main(["diff", "a", *words]) == code
        return capsys.readouterr().out.splitlines()

    assert diff("b", code=0) == [
        "A       a  step 3, completed",
        "B       b  step 3, completed",
        "equal   loss of rank 0 (3 steps), lr (1 step)",
        "same",
    ]
    lines = diff("c", code=1)
    settings, code = ["setting", "hyperparameters.lr", "0.1", "0.2"], ["code", "m", "1", "2"]
    assert [line.split() for line in lines[2:5]] == [["A", "B"], settings, code]
    assert lines[5:] == [
        "differs loss of rank 0: from step 2 on, 4.0 and 4.5 (0.5 apart); equal until step 1; at most 0.75 apart, at step 3, over 3 steps",
        "differs lr: from step 3 on, 0.1 and 0.2 (0.1 apart); from the first common step on; at most 0.1 apart, at step 3, over 1 step",
        "different from step 2 on (loss of rank 0, equal until step 1)",
    ]
    found = json.loads("".join(diff("c", "--json", code=1)))
    assert (found["same"], found["same_settings"], found["same_values"]) == (False, False, False)
    assert (found["first_step"], found["first_trace"], found["ends"]) == (2, "loss of rank 0", None)
    assert found["settings"] == [{"key": "hyperparameters.lr", "a": 0.1, "b": 0.2}]
    assert found["traces"][0]["parting"]["largest"] == 0.75
    # what the exit code is about
    diff("d", code=1)
    diff("d", "--only", "values", code=0)
    diff("d", "--only", "settings", code=1)
    diff("c", "--only", "values", "--rtol", "0.6", code=0)
    lines = diff("short", code=1)
    assert lines[1] == "B       short  step 2, not ended"
    assert lines[-2:] == ["ends    A at step 3, B at step 2", "different, although no common value differs"]
