"""How numbers are written."""

from __future__ import annotations

import math

import pytest

from zero_trial.util.text import format_bytes, format_count, format_duration, format_number, format_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (2.0, "2"),
        (2.79771, "2.798"),
        (0.004, "0.004"),
        (13127.65, "13128"),
        (1e-05, "1e−5"),
        (1.25e-05, "1.25e−5"),
        (-3.5, "−3.5"),
        (1e9, "1e9"),
        (math.nan, "not a number"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(667_648, "667.6k"), (13127.65, "13.1k"), (2e9, "2G"), (12.5, "12.5"), (0, "0")]
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (12, "12 B"), (2048, "2.0 KiB"), (23_562_252, "22.5 MiB"), (2**31, "2.0 GiB")]
)
def test_sizes(value: float | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (54.4, "54 s"), (200, "3 min 20 s"), (59.7, "1 min 0 s"), (3840, "1 h 04 min")]
)
def test_durations(value: float | None, text: str) -> None:
    assert format_duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (0.5, "0.5"),
        ({"lr": 0.004, "betas": [0.9, 1]}, "{lr: 0.004, betas: [0.9, 1]}"),
        ("auto", "auto"),
        (-1.0, "-1"),
    ],
)
def test_values_of_a_configuration(value: object, text: str) -> None:
    assert format_value(value) == text
