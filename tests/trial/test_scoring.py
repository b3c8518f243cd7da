"""The searcher's metric."""

from __future__ import annotations

import math

import pytest

from zero_trial.errors import ConfigError
from zero_trial.trial.controller import Score


@pytest.mark.parametrize(
    ("value", "best", "smaller", "larger"),
    [
        (1.0, 2.0, True, False),
        (2.0, 1.0, False, True),
        (1.0, 1.0, False, False),
        (1.0, None, True, True),
        (1.0, math.nan, True, True),
        (math.nan, 1.0, False, False),
        (math.nan, None, False, False),
    ],
)
def test_which_is_better(value: float, best: float | None, smaller: bool, larger: bool) -> None:
    assert Score("m", True).is_better(value, best) is smaller
    assert Score("m", False).is_better(value, best) is larger


def test_its_value_among_the_metrics() -> None:
    assert Score("loss").of({"loss": 2, "batches": 5}) == 2.0
    assert Score(None).of({}) is None
    for metrics, message in (
        ({"accuracy": 1.0}, r"never reported: got the trial reports \['accuracy'\]"),
        ({"loss": [1.0]}, "got a list of 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Score("loss").of({**metrics, "batches": 5, "epochs": 0})
