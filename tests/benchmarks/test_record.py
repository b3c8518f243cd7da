"""What a benchmark writes: a table, facts about machine and versions, and a command without paths;
the figures of README and of the guides are made from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures, memory, record


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


def test_a_result_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-dirty`` with changes, but not with those of results; rows of earlier runs keep theirs."""

    def git(*words: str) -> str:
        given = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(record, "FOLDER", results)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "benchmarks" / "record.py"))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    first = git("rev-parse", "--short", "HEAD")
    monkeypatch.setattr(record, "AT_START", record.commit())
    record.save("try", {}, [{"model": "gpt"}], [], "A note.")
    assert json.loads((results / "try.json").read_text())["commit"] == first
    assert f"- commit: {first}\n" in (results / "try.md").read_text()
    assert record.commit() == first, "a new result is no change of what is measured"
    (tmp_path / "module.py").write_text("")
    monkeypatch.setattr(record, "AT_START", record.commit())
    record.save("try", {}, [*record.earlier("try"), {"model": "mlp"}], [], "A note.")
    assert f"- commit: {first}, {first}-dirty\n" in (results / "try.md").read_text()
    assert [row["commit"] for row in record.earlier("try")] == [first, f"{first}-dirty"]
    (tmp_path / ".git").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() is None


@pytest.mark.parametrize(
    ("name", "dtype", "text", "on_two"),
    [
        ("ours-0", "fp32", "16", 16),
        ("ours-1-16bit", "bf16", "4 + 12/N", 10),
        ("ours-2", "bf16", "2 + 16/N", 10),
        ("ours-2", "fp16", "2 + 14/N", 9),
        ("ours-3-16bit-none", "bf16", "14/N", 7),
    ],
)
def test_formula_of_the_bytes_between_steps(name: str, dtype: str, text: str, on_two: float) -> None:
    assert memory.formula(name, dtype, 2) == {"formula": text, "formula_bytes": on_two}
    assert memory.formula("fsdp2", dtype, 2) == {}


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
