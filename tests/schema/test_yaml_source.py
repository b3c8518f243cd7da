"""YAML with lines."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.schema.yaml_source import read_yaml


def test_values_and_lines():
    document = read_yaml("a: 1\nb:\n  c: [1, x]\n  d: {e: true}\n", "const.yaml")
    assert document.value == {"a": 1, "b": {"c": [1, "x"], "d": {"e": True}}}
    assert document.at(("b", "d", "e")).where("b.d.e") == "const.yaml:4 b.d.e"


def test_a_bare_exponent_is_a_number_with_a_warning():
    document = read_yaml("hyperparameters:\n  lr: 1e-4\n  size: 5e8\n  text: '1e-4'\n  ok: 1.0e-4\n", "const.yaml")
    assert document.value["hyperparameters"] == {"lr": 1e-4, "size": 5e8, "text": "1e-4", "ok": 1e-4}
    assert document.warnings == (
        "const.yaml:2 hyperparameters.lr: '1e-4' is a string in YAML 1.1. Write 1.0e-4.",
        "const.yaml:3 hyperparameters.size: '5e8' is a string in YAML 1.1. Write 500000000.",
    )


def test_duplicates_are_named_with_both_lines():
    with pytest.raises(ConfigError, match=r"f:3 a.b: duplicate key: got it on line 2 and line 3"):
        read_yaml("a:\n  b: 1\n  b: 2\n", "f")


def test_merged_keys_give_way_to_own_ones():
    text = "base: &base {a: 1, b: 2}\nmine:\n  <<: *base\n  b: 3\n"
    assert read_yaml(text, "f").value["mine"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "f:2: not readable as YAML"),
        ("- 1\n", "f: not a YAML mapping"),
        ("", "f: not a YAML mapping"),
        ("a: !!python/name:os.system x\n", "f:1: not readable as YAML"),
        ("a: 2001-99-99\n", "f: not readable as YAML"),
        ("a: \x01\n", "f: not readable as YAML"),
        ("a: " + "[" * 100 + "]" * 100, "too deeply nested"),
        ("a: " + "[" * 1500, "f"),
    ],
)
def test_broken_text(text: str, message: str):
    with pytest.raises(ConfigError) as error:
        read_yaml(text, "f")
    assert message in str(error.value)


def test_aliases_that_explode_are_stopped():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    with pytest.raises(ConfigError, match="too large"):
        read_yaml("\n".join(lines), "f")
