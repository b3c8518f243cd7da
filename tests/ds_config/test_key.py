"""A row of the table: its parts, and when a value asks for something."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.key import Key, Origin, Support, alike, ignored, refused
from zero_trial.schema.types import Bool, Int, Opaque, Section


def test_a_row_knows_its_place():
    row = Key("a.b.c", Int(), Support.HONOURED, "why")
    assert (row.parent, row.name, row.is_section) == ("a.b", "c", False)
    assert Key("a", Section(), Support.HONOURED, "why").parent == ""
    assert Key("a", Section(), Support.HONOURED, "why").is_section


@pytest.mark.parametrize(
    ("value", "asks"),
    [
        (None, False),
        (1, False),  # the default
        (-1, False),  # harmless
        (2, True),
        ({"enabled": False, "x": 1}, False),
        ({"enabled": True}, True),
        ({"enabled": "auto"}, True),
        ({"a": {"enabled": False}, "b": {"enabled": False}}, False),
        ({"a": {"enabled": False}, "b": {"shared": {"enabled": True}}}, True),
        ({"mode": "fixed"}, True),
        ({}, False),
    ],
)
def test_asking(value: Any, asks: bool):
    assert Key("k", Opaque(), Support.REFUSED, "why", default=1, harmless=(-1,)).asks(value) is asks


def test_false_is_not_zero():
    row = Key("k", Opaque(), Support.HONOURED, "why", harmless=(False, -1))
    assert row.is_harmless(False) and row.is_harmless(-1)
    assert not row.is_harmless(0) and not row.is_harmless(-1.0) and not row.is_harmless(True)


def test_rows_that_are_alike():
    rows = alike("s", Support.NOT_YET, "later", a=Bool(), b=Int())
    assert [row.path for row in rows] == ["s.a", "s.b"]
    assert {row.answer for row in rows} == {Support.NOT_YET}


def test_short_forms():
    assert ignored("x", "gone").answer is Support.NO_EFFECT
    assert refused("x", "gone").answer is Support.REFUSED
    assert refused("x", "gone").instead == "Set enabled: false, or remove the section."
    assert refused("x", "gone", origin=Origin.DEEPSPEED).origin is Origin.DEEPSPEED
