"""How long, and when: from an experiment config."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.trial.settings import Batch, Epoch, Keep, TrainSettings, settings_from_experiment


def test_what_an_experiment_says() -> None:
    experiment = {
        "searcher": {"name": "single", "metric": "accuracy", "smaller_is_better": False, "max_length": {"epochs": 3}},
        "min_validation_period": {"batches": 50},
        "min_checkpoint_period": {"records": 320},
        "scheduling_unit": 10,
        "checkpoint_policy": "all",
        "perform_initial_validation": True,
        "checkpoint_storage": {"save_trial_best": 2, "save_trial_latest": 1},
    }
    assert settings_from_experiment(experiment, {"global_batch_size": 32}) == TrainSettings(
        max_length=Epoch(3),
        validation_period=Batch(50),
        checkpoint_period=Batch(10),
        reporting_period=Batch(10),
        checkpoint_policy="all",
        step_zero_validation=True,
        metric="accuracy",
        smaller_is_better=False,
        keep=Keep(best=2, latest=2),
    )


def test_the_defaults_are_determineds() -> None:
    settings = settings_from_experiment({"searcher": {"max_length": 7}}, {})
    assert settings.max_length == Batch(7) and settings.reporting_period == Batch(100)
    assert (settings.validation_period, settings.checkpoint_policy, settings.keep) == (Batch(0), "best", Keep(1, 2))


def test_a_run_needs_a_length_and_a_known_policy() -> None:
    with pytest.raises(ConfigError, match=r"searcher.max_length: the run has no length"):
        settings_from_experiment({"searcher": {"name": "single"}}, {})
    with pytest.raises(ConfigError, match="got sometimes, expected best or all or none"):
        TrainSettings(max_length=Batch(1), checkpoint_policy="sometimes")
