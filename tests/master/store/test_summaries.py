"""Summaries say what a Determined master says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zero_trial.master.store.metrics import extend, kind_of


def summary(*values: Any) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for value in values:
        extend(found, {"m": value})
    return found["m"]


@pytest.mark.parametrize("nan", [math.nan, "NaN"])
def test_nan_stays_visible(nan: Any):
    found = summary(1.0, nan, 5.0)
    assert (found["count"], found["last"], found["type"]) == (3, 5.0, "number")
    assert all(math.isnan(found[name]) for name in ("min", "max", "sum", "mean"))


def test_infinities():
    found = summary(1.0, "Infinity", 3.0)
    assert (found["min"], found["max"], found["mean"]) == (1.0, math.inf, math.inf)
    found = summary("-Infinity", math.nan)
    assert found["min"] == -math.inf and math.isnan(found["max"])


def test_values_of_two_types_are_text():
    assert summary(1.0, "a") == {"type": "string", "last": "a"}
    assert summary(1.0, "a", 2.0) == {"type": "string", "last": 2.0}


def test_the_last_value_is_that_of_the_newest_report():
    found: dict[str, dict[str, Any]] = {}
    for metrics in ({"a": 1, "b": 2}, {"a": 3}):
        extend(found, metrics)
    assert (found["a"]["last"], found["b"]["last"], found["b"]["count"]) == (3, None, 1)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "number"),
        (1.5, "number"),
        ("-Infinity", "number"),
        (True, "boolean"),
        (None, "null"),
        ("x", "string"),
        ("2026-01-31T12:00:00Z", "date"),
        ("2026-01-31", "string"),
        ({}, "object"),
        ([], "array"),
    ],
)
def test_types(value: Any, kind: str):
    assert kind_of(value) == kind and summary(value)["type"] == kind
