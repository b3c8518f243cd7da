"""The tree: a class name stands once, files say what they are, nothing tells of one machine."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.sources import ROOT, modules, parse, tracked_files

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/[\w.]")
WORDS = re.compile(r"\b(?:this|last|next|your|my) sess" + r"ion\b", re.IGNORECASE)
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links|download\.pytorch\.org|pypi\.org/simple|file:/" + "//")


def text_files() -> list[tuple[str, str]]:
    """Tracked files that are text, by name."""
    found = []
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" not in raw[:4096]:
            found.append((str(path.relative_to(ROOT)), raw.decode("utf-8", errors="replace")))
    return found


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


def test_the_rules_can_fail():
    assert (
        MACHINE_PATHS.search("see /ho" + "me/ann/x")
        and not MACHINE_PATHS.search("a/work/x")
        and not MACHINE_PATHS.search("/job/hostfile")
    )


RETIRED = re.compile(
    r"\b(mend(s|ed|ing)?|anew|as a rule|cannot be had|in the place of|of itself|for ever|to the bit|whoever|nobody|somebody|"
    r"genuine)\b",
    re.IGNORECASE,
)
TEXTS = {".py", ".md", ".h", ".cpp", ".cu", ".js", ".css", ".yaml", ".toml", ""}


def test_retired_words_are_not_used() -> None:
    """Results of benchmarks are history and stay as they are."""
    found = [
        f"{name}:{number}: {match[0]}"
        for path in tracked_files()
        if (name := path.relative_to(ROOT).as_posix()) != "tests/architecture/test_tree.py"
        and path.suffix in TEXTS
        and not name.startswith("benchmarks/results/")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := RETIRED.search(line))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["It is made anew.", "Mend the disk.", "to the bit"])
def test_the_rule_can_fail(text: str) -> None:
    assert RETIRED.search(text)
