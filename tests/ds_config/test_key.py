"""A row of the table: its parts, and when a value asks for something."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from zero_trial.ds_config.key import DECLARED, Key, Support, refused, section, supported
from zero_trial.schema.types import Bool, Int, Opaque, Text


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
        ({"a": {"shared_parameters": {"enabled": False}, "different_groups": {"wq1": {"params": {"bits": 4}}}}}, False),
        ({"a": {"shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": {"bits": 4}}}}}, True),
        ({"mode": "fixed"}, True),
        ({}, False),
    ],
)
def test_asking(value: Any, asks: bool):
    assert Key("k", Opaque(), Support.REFUSED, "why", default=1, harmless=(-1,)).asks(value) is asks


def test_false_is_not_zero():
    row = Key("k", Opaque(), Support.SUPPORTED, "why", harmless=(False, -1))
    assert row.is_harmless(False) and row.is_harmless(-1)
    assert not row.is_harmless(0) and not row.is_harmless(-1.0) and not row.is_harmless(True)


@dataclass(frozen=True)
class Inner:
    level: int = supported(3, Int(0), "how much")
    old: ClassVar = refused(False, Bool(), "it is gone", instead="Remove the key.")


@dataclass(frozen=True)
class Outer:
    name: str = supported(None, Text(), "what it is called", required=True)
    params: dict[str, Any] = supported({}, Opaque(), "anything")
    inner: Inner | None = section(Inner, "more", optional=True, switch="level")
    always: Inner = section(Inner, "more")


def test_a_declaration_is_a_field_and_a_row():
    made = Outer("x")
    assert (made.inner, made.always.level, made.params) == (None, 3, {})
    assert made.params is not Outer("y").params
    with pytest.raises(TypeError):
        Outer()  # type: ignore[call-arg]
    row = Outer.__dataclass_fields__["inner"].metadata[DECLARED]
    assert (row.section, row.is_section, row.support) == (Inner, True, Support.SUPPORTED)
    old = Inner.__dataclass_fields__["old"].metadata[DECLARED]
    assert (old.support, old.instead) == (Support.REFUSED, "Remove the key.")
    assert [item.name for item in dataclasses.fields(Inner)] == ["level"]
