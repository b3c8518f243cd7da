"""The map says what the tree holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.architecture.sources import PACKAGE, ROOT

MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NOUNS = re.findall(r"^\| (\w+) \| .+ \| `([\w/]+\.py)` \|$", MAP, re.MULTILINE)


def test_there_are_fifteen_nouns():
    assert len({noun for noun, _ in NOUNS}) == len(NOUNS) == 15


@pytest.mark.parametrize(("noun", "path"), NOUNS)
def test_a_noun_is_where_the_map_says(noun: str, path: str):
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    assert noun in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


VERB = re.compile(r"^(\| `(\w+)\.(\w+)` \| `([\w/]+\.py):)(\d+)", re.MULTILINE)


def with_current_lines(text: str) -> str:
    """Return ``text`` with the line at which each verb of the step begins."""

    def line_of(verb: re.Match[str]) -> str:
        kind, method, path = verb.group(2, 3, 4)
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
        lines = [node.lineno for body in bodies for node in body if getattr(node, "name", "") == method]
        return f"{verb[1]}{lines[0] if lines else 'no such method'}"

    return VERB.sub(line_of, text)


def test_each_verb_of_a_step_is_at_its_line():
    assert len(VERB.findall(MAP)) >= 15
    assert with_current_lines(MAP) == MAP, "run: python -m tests.architecture.test_docs"


def test_every_room_is_on_the_map():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", MAP, re.MULTILINE))))
    assert rooms - listed - {"templates", "data"} == set()


def test_paths_in_the_documentation_exist():
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for path in re.findall(
            r"`((?:zero_trial|tests|benchmarks|experiments|model_defs|docs)/[\w./-]+\.\w+)`", page.read_text()
        )
        if not (ROOT / path).exists()
    ]
    assert missing == []


def test_decisions_are_listed_once_under_their_titles():
    folder = ROOT / "docs" / "decisions"
    pages = {path.name: path.read_text(encoding="utf-8").split("\n")[0] for path in folder.glob("*.md")}
    listed = re.findall(r"^\| \[(.+)\]\((.+?)\)", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted((name, f"# {title}") for title, name in listed) == sorted(
        pages.items() - {("README.md", "# Decisions")}
    )


def test_figures_in_pages_are_those_of_the_results():
    """If this fails: python benchmarks/figures.py, or restore results that short runs replaced."""
    subprocess.run([sys.executable, "benchmarks/figures.py", "--check"], cwd=ROOT, check=True)


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.md").write_text(with_current_lines(MAP), encoding="utf-8")
