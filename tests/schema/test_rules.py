"""The rules that the sections are written in."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.schema import rules
from zero_trial.schema.rules import (
    Field,
    Fields,
    Flag,
    Forbidden,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Rule,
    Tagged,
    TextRule,
    Whole,
)

POINT = Fields({"x": Field(Whole(), required=True), "y": Field(Whole(), 7), "tags": Field(ListOf(TextRule()), [])})


def test_a_section():
    assert POINT.check({"x": 1, "tags": ["a"]}, "p") == []
    assert POINT.fill({"x": 1, "y": None}) == {"x": 1, "y": 7, "tags": []}
    assert POINT.check({"y": "a", "z": 1}, "p") == [
        "p.z: unknown property.",
        "p.x: is a required property",
        'p.y: "a" is not an integer',
    ]


def test_checks_come_after_the_keys():
    section = Fields(POINT.keys, (lambda value: "x is odd" if value["x"] % 2 else None,))
    assert section.check({"x": 3}, "p") == ["p: x is odd"]
    assert section.check({"x": "3"}, "p") == ['p.x: "3" is not an integer']


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (TextRule(), ["", "a"], [1, None, [], True]),
        (TextRule(("a", "b")), ["a"], ["c", 1, ["a"]]),
        (TextRule(pattern="^/", otherwise="no"), ["/a"], ["a", 1]),
        (Whole(0, 9), [0, 9], [-1, 10, 1.0, True, "1"]),
        (Number(above=1), [1.5, 2], [1, float("nan"), float("inf"), "2", False]),
        (Number(low=0), [0, 2.5], [-0.5]),
        (Flag(), [True, False], [0, 1, "true", None]),
        (MapOf(), [{}, {"a": 1}], [[], "a", None]),
        (MapOf(Whole()), [{"a": 1}], [{"a": "b"}]),
        (ListOf(Whole()), [[], [1]], [["a"], {}, "1"]),
        (OneOf((Whole(), Flag()), "no"), [1, True], ["a"]),
        (Forbidden("no"), [], [1, "a", {}]),
    ],
)
def test_good_and_bad(rule: Rule, good: list[Any], bad: list[Any]):
    assert [value for value in good if rule.check(value, "x")] == []
    assert [value for value in bad if not rule.check(value, "x")] == []


def test_kinds():
    kinds = Tagged(
        "is",
        {"point": Fields({"is": Field(TextRule()), "x": Field(Whole(), 3)})},
        "no such thing",
        {"line": "Use point."},
    )
    assert kinds.check({"is": "point"}, "p") == [] and kinds.fill({"is": "point"}) == {"is": "point", "x": 3}
    assert kinds.check({"is": "line"}, "p") == ["p.is: Use point."]
    assert kinds.check({"is": "blob"}, "p") == kinds.check({"is": ["point"]}, "p") == ["p: no such thing"]
    assert kinds.check({}, "p") == ["p.is: is a required property"]
    assert kinds.check(3, "p") == ["p: 3 is not a map"]


def test_either_fills_as_the_rule_that_fits():
    rule = OneOf((Whole(), POINT), "no")
    assert rule.fill(3) == 3 and rule.fill({"x": 1})["y"] == 7


def test_defaults_are_not_shared():
    section = Fields({"tags": Field(ListOf(TextRule()), []), "ports": Field(MapOf(), {})})
    filled = section.fill({})
    filled["tags"].append("a")
    filled["ports"]["a"] = 1
    assert section.fill({}) == {"tags": [], "ports": {}}


@pytest.mark.parametrize(
    ("value", "text"), [("a", '"a"'), (True, "true"), (None, "null"), ([1], "[1]"), ("x" * 99, '"' + "x" * 56 + "...")]
)
def test_shown(value: Any, text: str):
    assert rules.spelled(value) == text
