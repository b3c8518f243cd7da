"""Periods in batches, epochs and records."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.sections import NEVER, PERIOD, SEARCHER_LENGTH, Period, PeriodOf
from zero_trial.schema.types import ValidationError


@pytest.mark.parametrize(
    ("value", "period"),
    [
        ({"batches": 100}, Period("batches", 100)),
        ({"epochs": 2}, Period("epochs", 2)),
        ({"records": 5e3}, Period("records", 5000)),
        (7, Period("batches", 7)),
        ({"batches": 0}, NEVER),
    ],
)
def test_reads(value: Any, period: Period):
    assert PeriodOf().read(value).value == period
    assert type(PeriodOf().read(value).value.count) is int


@pytest.mark.parametrize(
    "value", [{"steps": 1}, {}, {"batches": 1, "epochs": 1}, {"batches": -1}, {"batches": "x"}, "x", None, True, 1.5]
)
def test_refuses(value: Any):
    with pytest.raises(ValidationError, match=r"\{batches: n\}"):
        PeriodOf().read(value)


def test_a_length_is_positive():
    with pytest.raises(ValidationError) as problem:
        PeriodOf(1).read({"batches": 0})
    assert problem.value.fix == "0 is not a positive integer."


def test_in_batches():
    assert Period("batches", 5).batches() == 5
    assert Period("epochs", 2).batches() is None
    assert Period("epochs", 2).batches(epoch_batches=10) == 20
    assert Period("records", 33).batches(global_batch_size=16) == 3
    assert Period("records", 33).batches() is None
    assert str(Period("epochs", 2)) == "2 epochs"


@pytest.mark.parametrize(
    ("value", "period", "length"),
    [
        ({"batches": 1}, True, True),
        ({"records": 0}, True, False),
        (5, False, True),
        (0, False, False),
        ({"batches": 1, "epochs": None}, False, False),
        ({"batches": True}, False, False),
    ],
)
def test_lengths_of_a_cluster(value: Any, period: bool, length: bool):
    assert [not rule.check(value, ("x",)) for rule in (PERIOD, SEARCHER_LENGTH)] == [period, length]
