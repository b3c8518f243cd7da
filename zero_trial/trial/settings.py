"""How long a trial runs, and when it reports, validates and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.trial.metrics import COUNTERS
from zero_trial.trial.periods import EVERY_HUNDRED, NEVER, TrainUnit, read_unit

POLICIES = ("best", "all", "none")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a trial stay: the best few by the searcher's metric and the latest few. None keeps all."""

    best: int | None = None
    latest: int | None = None


@dataclass(frozen=True)
class TrainSettings:
    """The arguments of ``fit``, under Determined's names.

    ``max_length`` counts the whole trial's steps, also those before a resume. ``checkpoint_policy``: after a validation
    save if it is the ``best`` so far, save after ``all`` of them, or ``none``.
    """

    max_length: TrainUnit
    validation_period: TrainUnit = NEVER
    checkpoint_period: TrainUnit = NEVER
    reporting_period: TrainUnit = EVERY_HUNDRED
    checkpoint_policy: str = "best"
    step_zero_validation: bool = False
    metric: str | None = None
    smaller_is_better: bool = True
    keep: Keep = Keep()
    validation_batches: int | None = None  # at most so many per validation, for a trial run

    def __post_init__(self) -> None:
        if self.checkpoint_policy not in POLICIES:
            raise ConfigError(
                "unknown policy", where="checkpoint_policy", got=self.checkpoint_policy, expected=" or ".join(POLICIES)
            )


def run_length(experiment: Mapping[str, Any], hparams: Mapping[str, Any]) -> TrainUnit | None:
    """How long an experiment config (plain data) says that a trial runs: ``searcher.max_length``, or adaptive_asha's
    ``max_time`` if its ``time_metric`` counts steps or epochs. None where it does not say.
    """
    searcher = experiment.get("searcher") or {}
    if searcher.get("max_length") is not None:
        return read_unit(searcher["max_length"], "searcher.max_length", hparams.get("global_batch_size"))
    time_metric = searcher.get("time_metric")
    if searcher.get("max_time") is None or time_metric not in COUNTERS:
        return None
    return read_unit({time_metric: searcher["max_time"]}, "searcher.max_time")


def settings_from_experiment(
    experiment: Mapping[str, Any], hparams: Mapping[str, Any], max_length: TrainUnit | None = None
) -> TrainSettings:
    """The settings that an experiment config (plain data) asks for; Determined's defaults where it says nothing.

    Raises ConfigError when neither it nor ``max_length`` says how long the run is.
    """
    searcher = experiment.get("searcher") or {}
    samples = hparams.get("global_batch_size")
    length = max_length if max_length is not None else run_length(experiment, hparams)
    if length is None:
        raise ConfigError(
            "the run has no length", where="searcher.max_length", fix="Write searcher: {max_length: {batches: 200}}."
        )

    def period(name: str, default: int) -> TrainUnit:
        value = experiment.get(name)
        return read_unit(default if value is None else value, name, samples)

    return TrainSettings(
        max_length=length,
        validation_period=period("min_validation_period", 0),
        checkpoint_period=period("min_checkpoint_period", 0),
        reporting_period=period("scheduling_unit", 100),
        checkpoint_policy=str(experiment.get("checkpoint_policy") or "best"),
        step_zero_validation=bool(experiment.get("perform_initial_validation", False)),
        metric=searcher.get("metric"),
        smaller_is_better=bool(searcher.get("smaller_is_better", True)),
        keep=_keep(experiment.get("checkpoint_storage") or {}),
    )


def _keep(storage: Mapping[str, Any]) -> Keep:
    """Determined's numbers, but at least two latest ones: one may turn out to be damaged."""
    best, latest = storage.get("save_trial_best", 1), storage.get("save_trial_latest", 2)
    return Keep(best=int(best), latest=max(int(latest), 2))
