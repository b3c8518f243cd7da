"""``zero-trial report``: a run's folder in, a page out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.test_run_folder import SUMMARY, make, start, train
from zero_trial.cli.main import main


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
