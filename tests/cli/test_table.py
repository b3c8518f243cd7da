"""Columns stand under each other."""

from __future__ import annotations

from zero_trial.cli.output import table


def test_words_stand_left_and_numbers_right() -> None:
    rows = [("name", "size", "state"), ("a", "1", ""), ("long one", "12345", "whole")]
    assert table(rows, right=(1,)).splitlines() == [
        "name       size  state",
        "a             1",
        "long one  12345  whole",
    ]


def test_nothing_is_nothing() -> None:
    assert table([]) == ""
