"""``zero-trial sweep report``: an experiment of the master, or a folder of runs, in; a page out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.searched import play
from tests.report.test_folder_of_runs import run
from zero_trial.cli.main import main


def test_an_experiment_of_the_master(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(tmp_path / "master.db")
    assert main(["sweep", "report", "1", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "report  sweep-1.html\n"
    assert "<h1>small search</h1>" in (tmp_path / "sweep-1.html").read_text()


def test_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "0001", 0.1, 1.0)
    assert main(["sweep", "report", str(tmp_path)]) == 0
    assert (tmp_path / "sweep.html").is_file()
    assert main(["sweep", "report", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").is_file()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "report", "nowhere"]) == 2
    assert "an experiment's id, or a folder of run folders" in capsys.readouterr().err
    assert main(["sweep", "report", "1", "--root", str(tmp_path)]) == 2
    assert "there is no master's store" in capsys.readouterr().err
