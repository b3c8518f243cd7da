"""Boundaries as a function of the global step, and the settings that an experiment asks for."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.trial.settings import (
    NEVER,
    Batch,
    Epoch,
    Keep,
    TrainPosition,
    TrainSettings,
    is_boundary,
    read_unit,
    settings_from_experiment,
    total_steps,
)


@pytest.mark.parametrize(
    ("unit", "due"),
    [
        (Batch(3), [3, 6, 9, 12]),
        (Batch(5), [5, 10]),
        (Epoch(1), [4, 8, 12]),
        (Epoch(2), [8]),
        (Batch((1, 7)), [1, 7]),
        (Epoch({2}), [8]),
        (NEVER, []),
        (Epoch(0), []),
    ],
)
def test_boundaries_of_twelve_steps_in_epochs_of_four(unit: Batch | Epoch, due: list[int]) -> None:
    assert [step for step in range(13) if is_boundary(step, unit, 4)] == due


def test_the_length_of_a_run_is_the_whole_trials() -> None:
    assert total_steps(Batch(7), 4) == 7
    assert total_steps(Epoch(3), 4) == 12
    with pytest.raises(ConfigError, match="has no length, so there are no epochs"):
        total_steps(Epoch(3), 2**62)
    for nothing in (Batch(0), Epoch(0), Batch((3,))):
        with pytest.raises(ConfigError, match="max_length"):
            total_steps(nothing, 4)


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (100, Batch(100)),
        ({"batches": 5}, Batch(5)),
        ({"epochs": 2}, Epoch(2)),
        ({"records": 100}, Batch(3)),
        ({"records": 5}, Batch(1)),
        ({"records": 0}, Batch(0)),
        (Epoch(1), Epoch(1)),
    ],
)
def test_units_as_an_experiment_writes_them(value: object, unit: Batch | Epoch) -> None:
    assert read_unit(value, "min_validation_period", 32) == unit


@pytest.mark.parametrize("value", [-1, "10", {"batches": 1.5}, {"steps": 3}, {"batches": 1, "epochs": 1}, True, {}])
def test_what_is_no_unit_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(ConfigError, match="min_validation_period"):
        read_unit(value, "min_validation_period", 32)
    with pytest.raises(ConfigError, match="global_batch_size"):  # records need it
        read_unit({"records": 100}, "searcher.max_length")


def test_a_position_knows_its_epoch() -> None:
    flags = [(p.epoch, p.is_epoch_start, p.is_epoch_end) for p in (TrainPosition(step, 3) for step in range(4))]
    assert flags == [(0, True, False), (0, False, False), (0, False, True), (1, True, False)]


@pytest.mark.parametrize("unit", [Batch(1.5), Epoch(-1), Batch("x"), Batch(None), Batch(True)])  # type: ignore[arg-type]
def test_units_that_count_nothing(unit: Batch | Epoch) -> None:
    with pytest.raises(ConfigError, match=r"fit\(validation_period=\.\.\.\): not a period"):
        read_unit(unit, "fit(validation_period=...)")
    assert read_unit(Batch({1, 3}), "x") == Batch({1, 3}) and read_unit(Epoch(0), "x") == Epoch(0)


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
    assert settings_from_experiment(experiment, 32) == TrainSettings(
        max_length=Epoch(3),
        validation_period=Batch(50),
        checkpoint_period=Batch(10),
        reporting_period=Batch(10),
        checkpoint_policy="all",
        step_zero_validation=True,
        metric="accuracy",
        smaller_is_better=False,
        keep=Keep(best=2, latest=2, at_end=1),
    )
    settings = settings_from_experiment({"searcher": {"max_length": 7}}, None)  # the defaults are Determined's
    assert settings.max_length == Batch(7) and settings.reporting_period == Batch(100)
    assert (settings.validation_period, settings.checkpoint_policy, settings.keep) == (Batch(0), "best", Keep(1, 2, 1))
    storage = {"save_experiment_best": 3, "save_trial_best": 0, "save_trial_latest": 0}  # its only trial is the best
    kept = settings_from_experiment({"searcher": {"max_length": 7}, "checkpoint_storage": storage}, None).keep
    assert kept == Keep(best=3, latest=2, at_end=0)
    with pytest.raises(ConfigError, match=r"searcher.max_length: the run has no length"):
        settings_from_experiment({"searcher": {"name": "single"}}, None)
    with pytest.raises(ConfigError, match="got sometimes, expected best or all or none"):
        TrainSettings(max_length=Batch(1), checkpoint_policy="sometimes")
