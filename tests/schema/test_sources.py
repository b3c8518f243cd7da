"""JSON and YAML as people write them, with lines."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.errors import ConfigError
from zero_trial.schema.config_source import read_json, read_yaml, write_yaml


def test_a_file_as_people_write_it():
    text = '{\n  // one\n  "a": 1,   # two\n  b: {c: 5e8, "d": [1, 2,],}  /* three\n */\n  \'e\': cpu\n}\n'
    document = read_json(text, "ds.json")
    assert document.value == {"a": 1, "b": {"c": 5e8, "d": [1, 2]}, "e": "cpu"}
    assert document.at(("a",)).line == 3
    assert document.at(("b", "c")).line == 4
    assert document.at(("e",)).where("e") == "ds.json:6 e"


VALUES = [
    ("1", 1), ("-1", -1), ("1.5", 1.5), ("1e-4", 1e-4), (".5", 0.5), ("true", True), ("null", None), ('"a\\n\\u0041"', "a\nA"),
    ("Infinity", math.inf), ("-Infinity", -math.inf), ("True", "True"), ("cpu", "cpu"), ("[]", []), ("{}", {}), ('"#//"', "#//"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values(text: str, value: Any):
    assert read_json(f'{{"k": {text}}}' if text not in ("cpu", "True") else f"{{k: {text}\n}}", "f").value == {
        "k": value
    }
    assert type(read_json(f'{{"k": {text}\n}}', "f").value["k"]) is type(value)


def test_nan():
    assert math.isnan(read_json('{"k": NaN}', "f").value["k"])


def test_a_byte_order_mark_and_missing_commas_are_fine():
    assert read_json('\ufeff{"a": 1\n"b": 2}', "f").value == {"a": 1, "b": 2}


def test_duplicate_keys_are_all_named_with_both_lines():
    with pytest.raises(ConfigError) as error:
        read_json('{"a": 1,\n"b": {"c": 1,\n"c": 2},\n"a": 3}', "ds.json")
    assert str(error.value) == (
        "2 faults:\n"
        "  ds.json:3 b.c: duplicate key: got it on line 2 and line 3. Remove one of them.\n"
        "  ds.json:4 a: duplicate key: got it on line 1 and line 4. Remove one of them."
    )


BROKEN = [
    ("", "f:1: not a JSON object"),
    ("[1]", "f:1: not a JSON object"),
    ('{"a": 1', "f:1: the text ends inside"),
    ('{"a": [1', "f:1: the text ends inside"),
    ('{"a"', 'f:1: no value for the key "a"'),
    ('{"a" 1}', 'f:1: no value for the key "a"'),
    ('{"a": }', "f:1: no value for a"),
    ('{"a": 1} x', "f:1: text after the end"),
    ('{\n"a": "x\n}', "f:2: a string is not terminated"),
    ('{"a": "\\q"}', "f:1: an unknown escape"),
    ('{"a": "\\u00g0"}', "f:1: an unknown escape"),
    ("{\n\n: 1}", "f:3: a key is missing"),
    ('{"a": 1 /* x', "f:1: a comment is not terminated"),
    ('{"a": 1,\n"b": {"c": True}}', "f:2: Python, not JSON: got True, expected true"),
    ('{"a": None,\n}', "f:1: Python, not JSON: got None, expected null"),
    ('{"a":' * 100 + "1" + "}" * 100, "too deeply nested"),
    ('{"a":' + "[" * 100, "too deeply nested"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_text_is_named_with_its_line(text: str, message: str):
    with pytest.raises(ConfigError) as error:
        read_json(text, "f")
    assert message in str(error.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=4))
def test_reads_what_json_writes(value: dict[str, Any]):
    """Strict JSON is read to the same values as by the standard library."""
    assert read_json(json.dumps(value), "f").value == value
    assert read_json(json.dumps(value, indent=2, ensure_ascii=False), "f").value == value


@settings(max_examples=200)
@given(st.text(alphabet='{}[]":,#/*\\ \n1eat-.', max_size=40))
def test_no_text_makes_it_crash(text: str):
    try:
        read_json("{" + text, "f")
    except ConfigError as error:
        assert str(error).startswith(("f:", "2 faults", "3 faults", "4 faults", "5 faults", "6 faults"))


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
        ("a: !!bool maybe\n", "f: not readable as YAML"),
        ("a: {null: 1}\n", "f:1 a: this key is not a string"),
        ("? [a]\n: 1\n", "f:1: this key is not a string"),
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


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("y", True), ("N", False), ("yes", True), ("No", False), ("on", True), ("OFF", False), ("'y'", "y"),
        ("010", 8), ("0o17", 15), ("0b11", 3), ("-0x1F", -31), ("1_000", 1000), ("09", 9), ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"), ("=", "="), ("<<x", "<<x"), ("1.5e3", 1500.0), (".5", 0.5), ("~", None),
    ],
)  # fmt: skip
def test_plain_scalars_mean_what_a_cluster_takes_them_for(written: str, value: object):
    assert read_yaml(f"a: {written}\nb: [{written}]\n", "f").value == {"a": value, "b": [value]}


def test_keys_become_text_and_keep_their_spelling():
    document = read_yaml("on: 1\na: {n: 2, 0x1f: 3, 1e3: 4, 1.5: 5, true: 6}\n", "f")
    assert document.value == {"true": 1, "a": {"false": 2, "31": 3, "1000": 4, "1.5": 5, "true": 6}}
    assert document.respelled == {("true",): "on", ("a", "false"): "n", ("a", "31"): "0x1f", ("a", "1000"): "1e3"}


def test_what_is_written_is_read_again_by_every_reader():
    value = {"n": "y", "on": "yes", "a": ["0o17", "2020-01-01", "1e3", "=", "~", "12:30", "010", ""], "b": {"N": 1e-5}}
    text = write_yaml(value)
    assert read_yaml(text, "f").value == yaml.safe_load(text) == value


@pytest.mark.parametrize(
    ("text", "line", "got", "fix"),
    [
        ("a: 1\nb:\n   c: 1\n  d: 2\n", 4, "'d: 2'", "Check the indentation"),
        ("a: 1\nb:\n  c: 1\n   d: 2\n", 4, "'d: 2'", "Check the indentation"),
        ("a: 1\nb:\n  c: 1\n\n  # so\n   d: 2\n", 6, "'d: 2'", "Check the indentation"),
        (" a: 1\nb: 2\n", 2, "'b: 2'", "Check the indentation"),
        ("a: 1\nb:\n\tc: 1\n", 3, "'c: 1'", "There is a tab: indent with spaces."),
        ("a: x: y\n", 1, "'a: x: y'", "Check the indentation, put a value with a colon"),
        ("a:1\nb: 2\n", 2, "'b: 2'", "Check the indentation, put a value with a colon"),
        ("a: 1\nfoo\nb: 2\n", 2, "'foo'", "Write key: value, with a space after the colon."),
        ("a: [1, 2\nb: 3\n", 2, "'b: 3'", "The bracket that line 1 opens is not closed."),
        ("a: {x: 1\nb: 3\n", 2, "'b: 3'", "The bracket that line 1 opens is not closed."),
        ("c: 1\na: 'x\nb: 3\n", 4, None, "The quote that line 2 opens is not closed."),
        ("a: @x\n", 1, "'a: @x'", "Put the value into quotes."),
    ],
)
def test_a_mistake_is_shown_with_its_line_and_what_to_do(text: str, line: int, got: str | None, fix: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read_yaml(text, "const.yaml")
    assert (fault.value.where, fault.value.got) == (f"const.yaml:{line}", got)
    assert fault.value.what.startswith("not readable as YAML: ")
    assert fault.value.fix is not None and fault.value.fix.startswith(fix)


def test_an_unknown_fault_is_passed_on_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^f:1: not readable as YAML: found undefined alias 'x': got 'a: \*x'\.$"):
        read_yaml("a: *x\n", "f")
