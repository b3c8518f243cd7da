"""The tree: a class name stands once, files say what they are, nothing tells of one machine."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.architecture.sources import ROOT, modules, parse, tracked_files

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/[\w.]")
WORDS = re.compile(r"\b(?:this|last|next|your|my) sess" + r"ion\b", re.IGNORECASE)
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links|download\.pytorch\.org|pypi\.org/simple|file:/" + "//")

EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))


def text_files() -> list[tuple[str, str]]:
    """Tracked files that are text, by name."""
    found = []
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" not in raw[:4096]:
            found.append((str(path.relative_to(ROOT)), raw.decode("utf-8", errors="replace")))
    return found


GAP = re.compile(r"(?<=\S) {2,}(?=[^\s#])")  # between two cells of a row
PROSE = re.compile(r"(?:\b[a-z]+\b\W+){4}")


def torn_rows(docstring: str) -> list[str]:
    """Find rows of a table that was wrapped like prose: a row in flowing text, whose cells begin in
    no other line's column."""
    plain = re.sub(r"``.*?``", lambda code: "`" * len(code[0]), docstring).splitlines()
    torn = []
    for number, row in enumerate(plain):
        columns = {gap.end() for gap in GAP.finditer(row)}
        beside = [plain[at] for at in (number - 1, number + 1) if 0 <= at < len(plain)]
        flowing = any(_indent(line) == _indent(row) and not GAP.search(line) and PROSE.search(line) for line in beside)
        others = [{_indent(line), *(gap.end() for gap in GAP.finditer(line))} for line in plain if line is not row]
        if columns and flowing and not any(columns & other for other in others):
            torn.append(docstring.splitlines()[number])
    return torn


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def test_a_public_class_name_stands_once():
    """A reader who meets a name finds one class of it."""
    places: dict[str, list[str]] = {}
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.place)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_file_name_stands_once():
    """Editor tabs and tracebacks show the name alone. Files that `init` copies are named like a
    user's files."""
    places: dict[str, list[str]] = {}
    for module in modules():
        if not module.path.name.startswith("__") and module.room != "cli.templates":
            places.setdefault(module.path.name, []).append(module.place)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("folder", ["zero_trial", "tests", "model_defs", "benchmarks"])
def test_files_say_what_they_are(folder: str):
    """The first line of the docstring is about the one thing that the file is."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    silent = [str(path.relative_to(ROOT)) for path in paths if not ast.get_docstring(parse(path).tree)]
    assert silent == []


@pytest.mark.parametrize("folder", ["zero_trial", "tests", "model_defs", "benchmarks"])
def test_tables_in_docstrings_are_whole(folder: str):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    torn = [
        f"{path.relative_to(ROOT)}: {row}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(parse(path).tree)
        if isinstance(node, kinds)
        for row in torn_rows(ast.get_docstring(node) or "")
    ]
    assert torn == []


def test_a_table_that_was_wrapped_like_prose_is_found():
    table = "    repeat      epoch after epoch\n    distribute  batch k goes to replica k mod N\n"
    assert torn_rows("The order:\n\n" + table + "\nSo every batch is read once.") == []
    torn = "    batch is full distribute  batch k goes to replica k mod N"
    wrapped = f"    repeat      epoch after epoch, so that every\n{torn}\n    and is read once by it"
    assert torn_rows("The order:\n\n" + wrapped) == [torn]


def test_no_path_or_word_of_one_machine():
    """Nothing in the project depends on, or tells of, the machine on which it was written."""
    found = [
        f"{name}: {match[0]}"
        for name, text in text_files()
        for rule in (MACHINE_PATHS, WORDS)
        for match in [rule.search(text)]
        if match
    ]
    assert found == []


def test_no_package_index_is_named():
    """Where packages come from is the user's setting, not ours."""
    found = [
        f"{name}: {match[0]}"
        for name, text in text_files()
        if name != "tests/architecture/test_tree.py" and (match := PACKAGE_INDEX.search(text))
    ]
    assert found == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(ROOT / "experiments")))
def test_every_experiment_can_be_read(path: Path):
    experiment = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "entrypoint", "searcher", "hyperparameters"} <= set(experiment)
    source = (experiment.get("data") or {}).get("ds_config")
    if isinstance(source, str):
        # what det sends lies with the model
        beside, model = path.parent / source, ROOT / "model_defs" / "gpt" / source
        json.loads((beside if beside.exists() else model).read_text(encoding="utf-8"))


def test_the_rules_can_fail():
    assert (
        MACHINE_PATHS.search("see /ho" + "me/ann/x")
        and not MACHINE_PATHS.search("a/work/x")
        and not MACHINE_PATHS.search("/job/hostfile")
    )
