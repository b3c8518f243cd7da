"""What a benchmark writes: a table, facts about machine and versions, and a command without paths;
README's figures are made from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import figures, record


def test_save_writes_table_and_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/engine.py", "--rounds", "2", "--before", "/checkouts/old"])
    columns = [("engine", lambda row: row["name"]), ("ms", record.number("wall_ms")), ("other", record.number("none"))]
    record.save("try", {"ranks": 2}, [{"name": "ddp", "wall_ms": 1.26}], columns, "A note.")
    table = "| engine | ms | other |\n|---|---|---|\n| ddp | 1.3 |  |"
    assert capsys.readouterr().out.strip() == table
    written = (tmp_path / "try.md").read_text()
    assert table in written
    assert "- command: python benchmarks/engine.py --rounds 2 --before old\n" in written
    facts = json.loads((tmp_path / "try.json").read_text())
    assert facts["versions"]["torch"]
    assert facts["machine"]["cores"] > 0
    assert facts["rows"] == [{"name": "ddp", "wall_ms": 1.26}]


def test_readme_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0


def test_another_figure_is_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = figures.README.read_text()
    other = tmp_path / "README.md"
    other.write_text(text.replace("`ops_cpu.md`", "`nothing.md`", 1))
    monkeypatch.setattr(figures, "README", other)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 1
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    assert other.read_text() == text
