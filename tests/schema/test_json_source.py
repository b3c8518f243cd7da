"""JSON as people write it, with lines."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.errors import ConfigError
from zero_trial.schema.config_source import read_json


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
    ('{\n"a": "x\n}', "f:2: a string is not closed"),
    ('{"a": "\\q"}', "f:1: an unknown escape"),
    ('{"a": "\\u00g0"}', "f:1: an unknown escape"),
    ("{\n\n: 1}", "f:3: a key is missing"),
    ('{"a": 1 /* x', "f:1: a comment is not closed"),
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
