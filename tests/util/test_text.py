"""Numbers with their units, and text without control characters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.util.text import (
    did_you_mean,
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_metric,
    format_number,
    format_value,
    parse_size,
    strip_control,
    table,
)


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("loss 2.1\n\tnext line", "loss 2.1\n\tnext line"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]52;c;ZWNobw==\x1b\\clipboard", "clipboard"),
        ("\x1b]0;never ends\nnext line", "\nnext line"),
        ("\x9b2Jcleared \x9d0;x\x9cdone", "cleared done"),
        ("\x1bPdevice\x1b\\ string", " string"),
        ("\x1bcreset", "reset"),
        ("over\rwritten \x08\x00\x7f", "overwritten "),
        ("ends in \x1b", "ends in "),
        ("ends in \x1b[38;5", "ends in "),
        ("half \ud800 pair", "half ? pair"),
        ("Größe ≤ 3 · 日本", "Größe ≤ 3 · 日本"),
    ],
)
def test_escape_sequences_and_control_characters_are_removed(raw: str, plain: str):
    assert strip_control(raw) == plain
    assert strip_control(plain) == plain


FORMATTED: list[tuple[Callable[[Any], str], list[tuple[Any, str]]]] = [
    (
        format_number,
        [
            (None, "–"), (0.0, "0"), (2.0, "2"), (2.79771, "2.798"), (0.004, "0.004"), (13127.65, "13128"), (1e-05, "1e−5"),
            (1.25e-05, "1.25e−5"), (-3.5, "−3.5"), (1e9, "1e9"), (math.nan, "not a number"), (-math.inf, "−∞"),
        ],
    ),
    (format_count, [(667_648, "667.6k"), (13127.65, "13.1k"), (2e9, "2G"), (12.5, "12.5"), (0, "0"), (12.3e6, "12.3M")]),
    (format_bytes, [(None, "–"), (12, "12 B"), (1023, "1023 B"), (23_562_252, "22.5 MiB"), (2**41, "2.0 TiB"), (-2048, "-2.0 KiB")]),
    (format_duration, [(None, "–"), (54.4, "54 s"), (200, "3 min 20 s"), (59.7, "1 min 0 s"), (3840, "1 h 04 min")]),
    (format_clock, [(12.4, "00:12"), (75, "01:15"), (3723, "1:02:03"), (-1, "00:00")]),
    (format_metric, [(2.113421, "2.113"), (7, "7"), (True, "True"), ("nan", "nan")]),
    (
        format_value,
        [(True, "true"), (None, "null"), (0.5, "0.5"), ({"lr": 0.004, "betas": [0.9, 1]}, "{lr: 0.004, betas: [0.9, 1]}"), (-1.0, "-1")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "cases"), FORMATTED, ids=lambda each: getattr(each, "__name__", ""))
def test_values_for_people(form: Callable[[Any], str], cases: list[tuple[Any, str]]) -> None:
    assert [form(value) for value, _ in cases] == [text for _, text in cases]


def test_a_misspelled_name_gets_the_nearest_one() -> None:
    for word, near in ("weight_decy", "weight_decay"), ("BETAS", "betas"), ("momentum_of_inertia", None):
        text = did_you_mean(word, ["lr", "betas", "weight_decay"])
        assert text == (near and f"Did you mean {near}?")


def test_sizes_that_people_write() -> None:
    sizes = {
        "16GiB": 16 * 2**30,
        "16 GB": 16 * 10**9,
        "1.5gib": 3 * 2**29,
        "500M": 5 * 10**8,
        "1e9": 10**9,
        "4096": 4096,
    }
    assert {text: parse_size(text, "--limit") for text in sizes} == sizes
    for text in ("", "much", "-1GiB", "0", "16XB", "16 G i B", "nan", "GB", "5 G B"):
        with pytest.raises(ConfigError, match="--limit: not a size"):
            parse_size(text, "--limit")


def test_a_table_aligns_text_left_and_numbers_right() -> None:
    rows = [("name", "size", "state"), ("a", "1", ""), ("long one", "12345", "whole")]
    assert table(rows, right=(1,)).splitlines() == [
        "name       size  state",
        "a             1",
        "long one  12345  whole",
    ]
    assert table([]) == ""
    assert table([("a\x1b]0;owned\x07", "b"), ("c", "\x1b[31md")]) == "a  b\nc  d"
