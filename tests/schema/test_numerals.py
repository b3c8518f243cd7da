"""Numbers as files hold them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zero_trial.schema.document import EXPONENT, spell_float
from zero_trial.schema.types import ValidationError, as_number


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1), (1.5, 1.5), ("1e-4", 1e-4), ("-2E3", -2000.0), (".5e1", 5.0), (math.inf, math.inf)]
)
def test_numbers(value: Any, number: float):
    found, warning = as_number(value, "a number")
    assert found == number
    assert (warning is not None) == isinstance(value, str)


@pytest.mark.parametrize(
    ("value", "fix"), [("32", "Write 32 without quotes."), ("many", None), (None, None), (True, None)]
)
def test_other_strings_are_not_numbers(value: Any, fix: str | None):
    with pytest.raises(ValidationError) as problem:
        as_number(value, "a number")
    assert problem.value.fix == fix


@pytest.mark.parametrize(
    ("number", "text"),
    [(1e-4, "1.0e-4"), (0.001, "0.001"), (0.0, "0.0"), (2.5e-7, "2.5e-7"), (1e22, "1.0e+22"), (3.0, "3.0")],
)
def test_floats_are_spelled_for_json_and_yaml(number: float, text: str):
    assert spell_float(number) == text
    assert float(text) == number


@pytest.mark.parametrize(
    ("text", "matches"),
    [("1e-4", True), ("1.e5", True), ("+1E+5", True), ("e5", False), ("1e", False), ("1.5", False), ("0x1e5", False)],
)
def test_what_an_exponent_is(text: str, matches: bool):
    assert bool(EXPONENT.fullmatch(text)) is matches


def test_a_number_too_large_is_none():
    with pytest.raises(ValidationError):
        as_number("1e999", "a number")
