"""The end of a run and progress bars."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from zero_trial.cli import output
from zero_trial.cli.output import disk_lines, report_outcome, shown
from zero_trial.launch.first_cause import Cause
from zero_trial.launch.supervisor import LaunchResult


def report(outcome: LaunchResult, folder: Path) -> tuple[int, str]:
    out = io.StringIO()
    return report_outcome(outcome, folder, out), out.getvalue()


def test_success_says_nothing(tmp_path: Path):
    assert report(LaunchResult(0), tmp_path) == (0, "")


def test_the_rank_its_words_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    code, text = report(LaunchResult(2, Cause(1, "a\nb", 2)), tmp_path / "runs" / "0001")
    assert (code, text) == (2, "failed  rank 1: a\n        b\nlog     runs/0001/logs/rank-1.log\n")


@pytest.mark.parametrize("code", [75, 130, 143])
def test_a_stop_is_no_failure(code: int, tmp_path: Path):
    assert report(LaunchResult(code, Cause(None, "stopped by SIGINT", code)), tmp_path) == (
        code,
        "stopped by SIGINT\n",
    )


def test_no_control_character_of_a_trial_reaches_the_terminal(tmp_path: Path):
    _, text = report(LaunchResult(1, Cause(1, "ValueError: \x1b]52;c;ZWNobw==\x07red \x1b[31mflag\r", 1)), tmp_path)
    assert text.startswith("failed  rank 1: ValueError: red flag\n") and text.replace("\n", "").isprintable()


def test_a_verdict_that_names_its_rank_is_not_given_another(tmp_path: Path):
    _, text = report(LaunchResult(4, Cause(1, "rank 0, step 6: the loss became nan", 4)), tmp_path)
    assert text.startswith("failed  rank 0, step 6: the loss became nan\nlog ") and text.endswith("rank-1.log\n")


def test_no_rank_to_blame_points_to_all_logs(tmp_path: Path):
    _, text = report(LaunchResult(5, Cause(None, "port in use", 5)), tmp_path)
    assert text == f"failed  port in use\nlog     {shown(tmp_path / 'logs')}\n"


def test_a_full_disk_is_named(tmp_path: Path):
    """The rank that met it could not write what it met."""
    assert disk_lines(tmp_path, room=0) == [] == disk_lines(tmp_path / "gone")
    (line,) = disk_lines(tmp_path, room=1 << 62)
    assert line.startswith("note    the disk of ") and line.endswith("KiB free): free some, or give --run-dir DIR")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""


@pytest.mark.parametrize(
    ("watched", "quiet", "drawn"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_it_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, watched: bool, quiet: bool, drawn: bool
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output, "is_terminal", lambda _: watched)
    bar = output.bytes_bar("verify", 100, quiet=quiet)
    bar.update(50)
    bar.refresh()
    bar.close()
    assert ("verify  50" in stream.getvalue()) is drawn


def test_no_control_character_of_a_name_reaches_the_terminal() -> None:
    assert shown(Path("/none/x\x1b[2J")) == "/none/x"
