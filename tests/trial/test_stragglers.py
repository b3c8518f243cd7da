"""A rank that is slow for two stretches of steps is named, once; noise and ranks that do not say are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.trial.reporting import StragglerWatch


def watch(*talks: tuple[int, Sequence[float | None]]) -> list[str]:
    """What is said after talks at these steps."""
    watched = StragglerWatch()
    return [told for step, busy in talks if (told := watched.see(step, busy)) is not None]


def test_a_slow_rank_is_named_with_its_times() -> None:
    (told,) = watch((1, (9.0, 0.0, 0.0)), (5, (0.4, 0.2, 2.0)), (9, (0.4, 0.4, 2.0)), (13, (0.4, 0.4, 2.0)))
    assert told == (
        "rank 2 keeps the others waiting: in steps 6 to 9 it was busy 0.50 s per step, and others 0.10 s. "
        "Look at its data loading, and at what else runs on its host"
    )


def test_short_talks_are_joined_to_a_stretch() -> None:
    talks = [(step, (0.010, 0.050)) for step in range(1, 20)]
    (told,) = watch(*talks)
    assert told.startswith(
        "rank 1 keeps the others waiting: in steps 6 to 9 it was busy 50.0 ms per step, and others 10.0 ms"
    )


@pytest.mark.parametrize(
    "stretches",
    [
        [(0.4, 2.0), (0.4, 0.4), (0.4, 2.0), (0.4, 0.4)],  # now and then
        [(0.4, 2.0), (2.0, 0.4), (0.4, 2.0)],  # each in its turn
        [(0.4, 0.79), (0.4, 0.79)],  # not twice as long
        [(0.001, 0.004), (0.001, 0.004)],  # a millisecond
        [(0.4, None), (0.4, None)],
        [(0.4,), (0.4,)],
    ],
)
def test_nothing_is_said(stretches: list[tuple[float | None, ...]]) -> None:
    assert watch((1, stretches[0]), *((5 + 4 * number, busy) for number, busy in enumerate(stretches))) == []


def test_in_a_run_busy_is_what_is_left_of_training_time() -> None:
    class Waits(LineTrial):
        def build_training_data_loader(self) -> Any:
            self.context.engines[0].seconds_waited = lambda: 0.25 * self.context.engines[0].global_steps
            return super().build_training_data_loader()

    ticks = iter(range(1000))
    run = run_rank(Waits, steps(12), clock=lambda: float(next(ticks)))
    assert run.outcome.step == 12
    assert not [event for event in run.record.events if "waiting" in event.get("message", "")], "alone, nobody is slow"
