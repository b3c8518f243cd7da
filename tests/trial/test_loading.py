"""The user's class, imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.trial.trial import import_trial_class


@pytest.fixture
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("search_path")
def test_the_class_and_what_is_none(tmp_path: Path):
    (tmp_path / "loading_sample.py").write_text(
        "from zero_trial import ZeroTrial\nclass Mine(ZeroTrial): ...\nclass Other: ...\nsomething = 3\n"
    )
    assert import_trial_class("loading_sample", "Mine", tmp_path).__name__ == "Mine"
    for name in ("Other", "something", "nothing"):
        with pytest.raises(ConfigError, match=r"it defines Mine\(ZeroTrial\). Use entrypoint: loading_sample:Mine."):
            import_trial_class("loading_sample", name, tmp_path)
