"""The image template learns to read a few letters, from the files that ``init`` writes to a
summary."""

from __future__ import annotations

from pathlib import Path

from tests.cli.templates.short import train_made


def test_it_learns(tmp_path: Path) -> None:
    summary = train_made(tmp_path, "image", 30, {"characters": "oxl", "variants": 4}, {"width": 8})
    assert summary["accuracy"] > 0.6
    assert (summary["step"], summary["data"]["classes"]) == (30, 3)
