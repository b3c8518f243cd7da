"""Mistakes of writing YAML: the line that is meant, what stands there, what to do."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.schema.yaml_source import read_yaml


@pytest.mark.parametrize(
    ("text", "line", "got", "fix"),
    [
        ("a: 1\nb:\n   c: 1\n  d: 2\n", 4, "'d: 2'", "It is indented by 2, line 3 by 3"),
        ("a: 1\nb:\n  c: 1\n   d: 2\n", 4, "'d: 2'", "It is indented by 3, line 3 by 2"),
        ("a: 1\nb:\n  c: 1\n\n  # so\n   d: 2\n", 6, "'d: 2'", "It is indented by 3, line 3 by 2"),
        (" a: 1\nb: 2\n", 2, "'b: 2'", "It is indented by 0, line 1 by 1"),
        ("a: 1\nb:\n\tc: 1\n", 3, "'c: 1'", "There is a tab: indent with spaces."),
        ("a: x: y\n", 1, "'a: x: y'", "Put a value that has a colon in it into quotes."),
        ("a:1\nb: 2\n", 2, "'b: 2'", "Write a space after the colon in line 1."),
        ("a: 1\nfoo\nb: 2\n", 2, "'foo'", "Write key: value, with a space after the colon."),
        ("a: [1, 2\nb: 3\n", 2, "'b: 3'", "The bracket that line 1 opens is not closed."),
        ("a: {x: 1\nb: 3\n", 2, "'b: 3'", "The bracket that line 1 opens is not closed."),
        ("c: 1\na: 'x\nb: 3\n", 4, None, "The quote that line 2 opens is not closed."),
        ("a: @x\n", 1, "'a: @x'", "Put the value into quotes."),
    ],
)
def test_what_to_do(text: str, line: int, got: str | None, fix: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read_yaml(text, "const.yaml")
    assert (fault.value.where, fault.value.got) == (f"const.yaml:{line}", got)
    assert fault.value.what.startswith("not readable as YAML: ")
    assert fault.value.fix is not None and fault.value.fix.startswith(fix)


def test_an_unknown_fault_is_passed_on_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^f:1: not readable as YAML: found undefined alias 'x': got 'a: \*x'\.$"):
        read_yaml("a: *x\n", "f")
