"""Words that the project does not use: a native reader stumbles over them."""

from __future__ import annotations

import re

import pytest

from tests.architecture.sources import ROOT, tracked_files

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
        if (name := path.relative_to(ROOT).as_posix()) != "tests/architecture/test_english.py"
        and path.suffix in TEXTS
        and not name.startswith("benchmarks/results/")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := RETIRED.search(line))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["It is made anew.", "Mend the disk.", "to the bit"])
def test_the_rule_can_fail(text: str) -> None:
    assert RETIRED.search(text)
