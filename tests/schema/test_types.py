"""Kinds: what each takes, what each refuses, and what is said about it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zero_trial.schema.document import spell_float
from zero_trial.schema.types import (
    AnyOf,
    Bool,
    DType,
    Float,
    Int,
    Names,
    Numbers,
    Opaque,
    Section,
    Text,
    Type,
    ValidationError,
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
    assert read.warning == f"'{text}' is a string in YAML 1.1. Write {spelled}."


def test_a_large_exponent_is_spelled_whole_for_integers():
    assert Int(1).read("5e8").value == 500_000_000
    assert Int(1).read("5e8").warning == "'5e8' is a string in YAML 1.1. Write 500000000."


def test_numbers_in_a_list_warn_too():
    assert Numbers(2).read(["9e-1", 0.95]).warning == "'9e-1' is a string in YAML 1.1. Write 0.9."


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
