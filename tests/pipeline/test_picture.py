"""Pictures: that one is drawn, and what is said where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pipeline.lowered import lowered
from zero_trial.errors import ConfigError
from zero_trial.pipeline.draw import save_picture
from zero_trial.pipeline.simulate import validate


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
