"""The speed of a trial's steps."""

from __future__ import annotations

import pytest

from zero_trial.util.speed import speed_of


@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [(0, (4, 1 / 1.5)), (1, (4, 1 / 1.5)), (2, (3, 0.5)), (3, (2, 0.5)), (4, (1, 0.5)), (5, (0, 0.0)), (9, (0, 0.0))],
)
def test_the_speed_of_the_steps_after_the_warm_up(warm_up: int, expected: tuple[int, float]) -> None:
    """Spans of 0.5, 1, 2 and 2 seconds between five steps."""
    assert speed_of([9.0, 9.5, 10.5, 12.5, 14.5], warm_up) == pytest.approx(expected)
