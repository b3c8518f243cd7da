"""How a run ended, in figures."""

from __future__ import annotations

from zero_trial.trial.reporting import End, Outcome


def test_samples_per_second_of_the_training_part() -> None:
    assert Outcome(End.COMPLETED, 10, 10, train_seconds=4.0, samples=100, checkpoint=None).samples_per_second == 25.0
    assert Outcome(End.STOPPED, 0, 10, train_seconds=0.0, samples=0, checkpoint=None).samples_per_second == 0.0
