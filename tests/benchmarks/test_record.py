"""What a benchmark writes: a table, facts about machine and versions, and a command without paths;
the figures of README and of the guides are made from it."""

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


def test_rows_of_earlier_runs_keep_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    for model in ("gpt", "bert", "mlp"):
        monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/tune.py", model])
        record.save("try", {}, [*record.earlier("try"), {"model": model}], [], "A note.")
    commands = [f"python benchmarks/tune.py {model}" for model in ("gpt", "bert", "mlp")]
    assert [(row["model"], row["command"]) for row in record.earlier("try")] == list(
        zip(("gpt", "bert", "mlp"), commands, strict=True)
    )
    lines = (tmp_path / "try.md").read_text().splitlines()
    assert [line for line in lines if "command" in line] == [f"- command: {each}" for each in commands]


def test_pages_say_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", figures.PAGES)
def test_another_figure_is_found_and_mended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    texts = {page: (record.FOLDER.parents[1] / page).read_text() for page in figures.PAGES}
    for page, text in texts.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text)
    before, _, rest = texts[name].partition(figures.BEGIN)
    (tmp_path / name).write_text(f"{before}{figures.BEGIN}\n9{rest}")
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 1
    assert capsys.readouterr().out.split(": ")[1].strip() == name
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    assert {page: (tmp_path / page).read_text() for page in figures.PAGES} == texts
