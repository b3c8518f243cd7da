"""Types of values: what each takes and refuses, and what is said about it; also of values with
others inside: sections, lists and maps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zero_trial.schema.document import spell_float
from zero_trial.schema.types import (
    CHOICE,
    MISSING,
    REMOVED,
    RULE,
    TYPE,
    UNKNOWN,
    AnyOf,
    Bool,
    DType,
    Field,
    Fields,
    Float,
    Forbidden,
    Int,
    Issue,
    ListOf,
    MapOf,
    Names,
    Numbers,
    Opaque,
    Section,
    Tagged,
    Text,
    Type,
    ValidationError,
    exact_float,
    exact_int,
    exact_text,
)

READS: list[tuple[Type, Any, Any]] = [
    (Bool(), True, True),
    (Int(), 5e8, 500_000_000),
    (Int(0, 3), 3, 3),
    (Int(1, infinite=True), math.inf, None),
    (Float(low=0), 1, 1.0),
    (Float(above=0, high=1), 1.0, 1.0),
    (Text(), "x", "x"),
    (Text(("Warn", "Fail")), "warn", "Warn"),
    (Text(("a",), synonyms=(("Bee", "a"),)), "bee", "a"),
    (Text(("a",), starts=("type:",)), "type:X|Y", "type:X|Y"),
    (DType(), "torch.bfloat16", "bf16"),
    (DType(), "bfp16", "bf16"),
    (DType(), "half", "fp16"),
    (Names(), "Block", ("Block",)),
    (Names(), ["a", "b"], ("a", "b")),
    (Numbers(2, 0.0, 1.0), [0.9, 0.95], (0.9, 0.95)),
    (AnyOf((Float(), Numbers())), [1, 2], (1.0, 2.0)),
    (Section(), {"a": 1}, {"a": 1}),
    (Opaque(), [None], [None]),
]

REFUSES: list[tuple[Type, Any]] = [
    (Bool(), 1),
    (Bool(), "true"),
    (Int(), True),
    (Int(), 1.5),
    (Int(), math.nan),
    (Int(), math.inf),
    (Int(), "32"),
    (Int(0, 3), 4),
    (Int(1), 0),
    (Float(), "0.1"),
    (Float(), math.inf),
    (Float(above=0), 0),
    (Float(low=0), -1e-9),
    (Float(high=1), 1.1),
    (Text(), 3),
    (Text(("a",)), "b"),
    (Text(("a",), synonyms=(("b", "a"),), starts=("type:",)), "type"),
    (DType(), "int8"),
    (DType(), 16),
    (Names(), [1]),
    (Numbers(2), [0.9]),
    (Numbers(2, 0.0, 1.0), [0.9, 1.0]),
    (AnyOf((Float(), Numbers())), "x"),
    (Section(), 3),
]


@pytest.mark.parametrize(("kind", "value", "inside"), READS)
def test_reads(kind: Type, value: Any, inside: Any):
    read = kind.read(value)
    assert (read.value, read.warning) == (inside, None)
    assert type(read.value) is type(inside)


@pytest.mark.parametrize(("kind", "value"), REFUSES)
def test_refuses(kind: Type, value: Any):
    with pytest.raises(ValidationError) as problem:
        kind.read(value)
    assert problem.value.expected == kind.describe()


@pytest.mark.parametrize(("text", "number", "spelled"), [("1e-4", 1e-4, "1.0e-4"), ("1e-04", 1e-4, "1.0e-4")])
def test_a_yaml_exponent_is_a_number_with_a_warning(text: str, number: float, spelled: str):
    read = Float().read(text)
    assert read.value == number
    assert read.warning == f"'{text}' is a string, read as a number. Write {spelled}."


def test_a_large_exponent_is_spelled_whole_for_integers():
    assert Int(1).read("5e8").value == 500_000_000
    assert Int(1).read("5e8").warning == "'5e8' is a string, read as a number. Write 500000000."


def test_numbers_in_a_list_warn_too():
    assert Numbers(2).read(["9e-1", 0.95]).warning == "'9e-1' is a string, read as a number. Write 0.9."


@pytest.mark.parametrize(
    ("value", "fix"), [("True", "Write true."), (0, "Write false."), ("off", "Write false."), ("x", None), ([], None)]
)
def test_what_was_meant_by_a_bool(value: Any, fix: str | None):
    with pytest.raises(ValidationError) as problem:
        Bool().read(value)
    assert problem.value.fix == fix


@pytest.mark.parametrize(
    ("number", "text"),
    [(1e-4, "1.0e-4"), (0.001, "0.001"), (0.0, "0.0"), (2.5e-7, "2.5e-7"), (1e22, "1.0e+22"), (3.0, "3.0")],
)
def test_floats_are_spelled_for_json_and_yaml(number: float, text: str):
    assert spell_float(number) == text
    assert float(text) == number


POINT = Fields(
    {"x": Field(exact_int(), required=True), "y": Field(exact_int(), 7), "tags": Field(ListOf(exact_text()), [])}
)


def test_a_section():
    assert POINT.check({"x": 1, "tags": ["a"]}, ("p",)) == []
    assert POINT.fill({"x": 1, "y": None}) == {"x": 1, "y": 7, "tags": []}
    assert POINT.check({"y": "a", "z": 1}, ("p",)) == [
        Issue(("p", "z"), UNKNOWN, "unknown property."),
        Issue(("p", "x"), MISSING, "is a required property"),
        Issue(("p", "y"), TYPE, '"a" is not an integer'),
    ]


def test_checks_come_after_the_keys():
    section = Fields(POINT.keys, (lambda value: "x is odd" if value["x"] % 2 else None,))
    assert section.check({"x": 3}, ("p",)) == [Issue(("p",), RULE, "x is odd")]
    assert section.check({"x": "3"}, ("p",)) == [Issue(("p", "x"), TYPE, '"3" is not an integer')]


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (exact_text(), ["", "a"], [1, None, [], True]),
        (exact_text(("a", "b")), ["a"], ["c", 1, ["a"]]),
        (exact_text(pattern="^/", otherwise="no"), ["/a"], ["a", 1]),
        (exact_int(0, 9), [0, 9], [-1, 10, 1.0, True, "1"]),
        (exact_float(above=1), [1.5, 2], [1, float("nan"), float("inf"), "2", False]),
        (exact_float(low=0), [0, 2.5], [-0.5]),
        (Bool(), [True, False], [0, 1, "true", None]),
        (MapOf(), [{}, {"a": 1}], [[], "a", None]),
        (MapOf(exact_int()), [{"a": 1}], [{"a": "b"}]),
        (ListOf(exact_int()), [[], [1]], [["a"], {}, "1"]),
        (AnyOf((exact_int(), Bool()), "no"), [1, True], ["a"]),
        (Forbidden("no"), [], [1, "a", {}]),
    ],
)
def test_good_and_bad(rule: Type, good: list[Any], bad: list[Any]):
    assert [value for value in good if rule.check(value, ("p",))] == []
    assert [value for value in bad if not rule.check(value, ("p",))] == []


def test_kinds():
    kinds = Tagged(
        "is",
        {"point": Fields({"is": Field(exact_text()), "x": Field(exact_int(), 3)})},
        "no such thing",
        {"line": "Use point."},
    )
    assert kinds.check({"is": "point"}, ("p",)) == [] and kinds.fill({"is": "point"}) == {"is": "point", "x": 3}
    assert kinds.check({"is": "line"}, ("p",)) == [Issue(("p", "is"), REMOVED, "Use point.")]
    assert (
        kinds.check({"is": "blob"}, ("p",))
        == kinds.check({"is": ["point"]}, ("p",))
        == [Issue(("p",), CHOICE, "no such thing")]
    )
    assert kinds.check({}, ("p",)) == [Issue(("p", "is"), MISSING, "is a required property")]
    assert kinds.check(3, ("p",)) == [Issue(("p",), TYPE, "3 is not a map")]


def test_either_fills_as_the_rule_that_fits():
    rule = AnyOf((exact_int(), POINT), "no")
    assert rule.fill(3) == 3 and rule.fill({"x": 1})["y"] == 7


def test_defaults_are_not_shared():
    section = Fields({"tags": Field(ListOf(exact_text()), []), "ports": Field(MapOf(), {})})
    filled = section.fill({})
    filled["tags"].append("a")
    filled["ports"]["a"] = 1
    assert section.fill({}) == {"tags": [], "ports": {}}


def test_an_issue_as_a_line():
    issue = ListOf(exact_int(1)).check([3, 0], ("searcher", "bracket_rungs"))[0]
    assert issue.line("<config>") == "<config>.searcher.bracket_rungs[1]: 0 is less than 1"


def test_reading_follows_from_checking():
    assert POINT.read({"x": 1}).value == {"x": 1}
    with pytest.raises(ValidationError) as error:
        POINT.read({"x": "a"})
    assert error.value.code == TYPE
