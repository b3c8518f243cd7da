"""Schedules drawn as text and as pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pipeline.lowered import drawn, lowered, report
from zero_trial.errors import ConfigError
from zero_trial.pipeline.draw import grid, rows_as_text, save_picture
from zero_trial.pipeline.simulator import Costs, validate


def test_costs_are_columns():
    assert grid(report("1f1b", 2, 2, costs=Costs(2, 2, 1, 1))) == drawn("""
        rank 0  F0 -  F1 -  .  .  .  .  .  B0 -  -  .  .  B1 -  -
        rank 1  .  .  .  F0 -  B0 -  -  F1 -  B1 -  -  .  .  .  .
    """)


def test_many_ranks_and_micro_batches_stay_aligned():
    lines = grid(report("gpipe", 11, 12)).splitlines()
    assert lines[0].startswith("rank 0   F0  F1 ") and lines[10].startswith("rank 10  .   .  ")


def test_times_that_are_no_columns():
    with pytest.raises(ConfigError, match="whole numbers"):
        grid(report("1f1b", 2, 2, costs=Costs(forward=1.5)))


def test_every_action():
    assert rows_as_text(lowered("1f1b", 1, 1)) == "rank 0  0F0 0B0 0REDUCE STEP"


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "inference"])
def test_a_picture(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    schedule = lowered(name, 2, 4)
    save_picture(schedule, validate(schedule), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("place", ["nowhere/a.png", "a.strange"])
def test_where_it_cannot_be_written(place: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    schedule = lowered("gpipe", 2, 2)
    with pytest.raises(ConfigError, match="the picture cannot be written"):
        save_picture(schedule, validate(schedule), tmp_path / place)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    schedule = lowered("gpipe", 2, 2)
    with pytest.raises(ConfigError, match=r"not installed\. pip install matplotlib, or leave --png out"):
        save_picture(schedule, validate(schedule), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
