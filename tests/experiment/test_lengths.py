"""Lengths and periods."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.sections import PERIOD, SEARCHER_LENGTH


@pytest.mark.parametrize(
    ("value", "period", "length"),
    [
        ({"batches": 1}, True, True),
        ({"epochs": 3}, True, True),
        ({"records": 0}, True, False),
        (5, False, True),
        (0, False, False),
        ({"batches": 1, "epochs": 1}, False, False),
        ({"batches": 1, "epochs": None}, False, False),
        ({"batch": 1}, False, False),
        ({"batches": True}, False, False),
        ([1], False, False),
    ],
)
def test_lengths(value: Any, period: bool, length: bool):
    assert [not rule.check(value, ("x",)) for rule in (PERIOD, SEARCHER_LENGTH)] == [period, length]
