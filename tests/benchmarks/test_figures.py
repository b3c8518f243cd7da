"""README's figures are those of benchmarks/results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import figures


def test_readme_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0


def test_another_figure_is_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = figures.README.read_text()
    other = tmp_path / "README.md"
    other.write_text(text.replace("ns per parameter", "hours per parameter", 1))
    monkeypatch.setattr(figures, "README", other)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 1
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    assert other.read_text() == text
