"""Lengths and periods."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.sections import PERIOD, SEARCHER_LENGTH, TIMED_LENGTH


@pytest.mark.parametrize(
    ("value", "period", "length", "timed"),
    [
        ({"batches": 1}, True, True, True),
        ({"epochs": 3}, True, True, True),
        ({"records": 0}, True, False, False),
        (5, False, True, False),
        (0, False, False, False),
        ({"batches": 1, "epochs": 1}, False, False, False),
        ({"batches": 1, "epochs": None}, False, False, False),
        ({"batch": 1}, False, False, False),
        ({"batches": True}, False, False, False),
        ([1], False, False, False),
    ],
)
def test_lengths(value: Any, period: bool, length: bool, timed: bool):
    assert [not rule.check(value, ("x",)) for rule in (PERIOD, SEARCHER_LENGTH, TIMED_LENGTH)] == [
        period,
        length,
        timed,
    ]
