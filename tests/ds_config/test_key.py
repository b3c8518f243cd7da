"""A row of the table: its parts, and when a value asks for something."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.key import Key, Support
from zero_trial.schema.types import Opaque


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
