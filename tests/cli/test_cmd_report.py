"""``zero-trial report`` and ``sweep report``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.report.samples import play
from tests.report.test_run_reader import SUMMARY, make, run, start, train
from zero_trial.cli.main import main
from zero_trial.master.store import Database


def test_the_page_lies_in_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "0001", [start(0), train(4, 1.0)], summary=SUMMARY)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report  {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_or_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = make(tmp_path / "0001", [start(0)])
    assert main(["report", str(folder), "-o", str(tmp_path / "x.html")]) == 0
    assert "<h1>small</h1>" in (tmp_path / "x.html").read_text()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no run in this folder" in capsys.readouterr().err
    folder = make(tmp_path / "0001", [start(0)])
    assert main(["report", str(folder), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_an_experiment_of_the_master(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(tmp_path / "master.db")
    for words in (["sweep", "report"], ["report"]):
        assert main([*words, "1", "--root", str(tmp_path)]) == 0
        assert capsys.readouterr().out == "report  sweep-1.html\n"
        assert "<h1>small search</h1>" in (tmp_path / "sweep-1.html").read_text()
        (tmp_path / "sweep-1.html").unlink()


@pytest.mark.parametrize(
    ("addressed", "message"),
    [
        ("127.0.0.1:4321", None),
        ("localhost:4321", None),
        ("http://[::1]:4321", None),
        (f"http://{socket.gethostname().upper()}:4321", None),
        ("http://127.0.0.1:1234", "DET_MASTER=http://127.0.0.1:1234"),
        ("https://cluster.example.com:4321", "DET_MASTER is not the one of this folder"),
        ("http://host:abc", "DET_MASTER: this is no address (Port could not be cast"),
        ("http://localhost:99999", "DET_MASTER: this is no address (Port out of range"),
        ("http://[::1", "DET_MASTER: this is no address (Invalid IPv6 URL): got http://[::1"),
    ],
)
def test_the_address_of_the_master_that_the_shell_talks_to(
    addressed: str,
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    play(tmp_path / "master.db")
    (tmp_path / "master.json").write_text('{"url": "http://127.0.0.1:4321"}')
    monkeypatch.setenv("ZERO_TRIAL_MASTER_ROOT", str(tmp_path))
    monkeypatch.setenv("DET_MASTER", addressed)
    assert main(["sweep", "report", "1"]) == (0 if message is None else 2)
    assert (message or "") in capsys.readouterr().err
    assert main(["sweep", "report", "1", "--root", str(tmp_path)]) == 0


def test_a_master_without_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Database(tmp_path / "master.db").close()
    assert main(["sweep", "report", "1", "--root", str(tmp_path)]) == 2
    assert "the master's store: there is no experiment yet: got 1" in capsys.readouterr().err


def test_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "0001", 0.1, 1.0)
    assert main(["report", str(tmp_path)]) == main(["sweep", "report", str(tmp_path)]) == 0
    assert (tmp_path / "sweep.html").is_file()
    assert main(["sweep", "report", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").is_file()


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


def test_mistakes_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "report", "nowhere"]) == 2
    assert "an experiment's id, or a folder of run folders" in capsys.readouterr().err
    assert main(["sweep", "report", "1", "--root", str(tmp_path)]) == 2
    assert "master's store" in capsys.readouterr().err
