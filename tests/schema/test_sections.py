"""Types of values with something inside them: sections, lists, maps, and the issues that they
name."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.schema.types import (
    CHOICE,
    MISSING,
    REMOVED,
    RULE,
    TYPE,
    UNKNOWN,
    AnyOf,
    Bool,
    Field,
    Fields,
    Forbidden,
    Issue,
    ListOf,
    MapOf,
    Tagged,
    Type,
    ValidationError,
    exact_float,
    exact_int,
    exact_text,
)

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
