"""How long a trial runs, and when it reports, validates and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ConfigError
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

    def __post_init__(self) -> None:
        if self.checkpoint_policy not in POLICIES:
            raise ConfigError(
                "unknown policy", where="checkpoint_policy", got=self.checkpoint_policy, expected=" or ".join(POLICIES)
            )


def settings_from_experiment(experiment: Mapping[str, Any], hparams: Mapping[str, Any]) -> TrainSettings:
    """The settings that an experiment config (plain data) asks for; Determined's defaults where it says nothing.

    Raises ConfigError when ``searcher.max_length`` is missing.
    """
    searcher = experiment.get("searcher") or {}
    samples = hparams.get("global_batch_size")
    if "max_length" not in searcher:
        raise ConfigError(
            "the run has no length", where="searcher.max_length", fix="Write searcher: {max_length: {batches: 200}}."
        )

    def period(name: str, default: int) -> TrainUnit:
        return read_unit(experiment.get(name, default), name, samples)

    return TrainSettings(
        max_length=read_unit(searcher["max_length"], "searcher.max_length", samples),
        validation_period=period("min_validation_period", 0),
        checkpoint_period=period("min_checkpoint_period", 0),
        reporting_period=period("scheduling_unit", 100),
        checkpoint_policy=str(experiment.get("checkpoint_policy", "best")),
        step_zero_validation=bool(experiment.get("perform_initial_validation", False)),
        metric=searcher.get("metric"),
        smaller_is_better=bool(searcher.get("smaller_is_better", True)),
        keep=_keep(experiment.get("checkpoint_storage") or {}),
    )


def _keep(storage: Mapping[str, Any]) -> Keep:
    """Determined's numbers, but at least two latest ones: one may turn out to be damaged."""
    best, latest = storage.get("save_trial_best", 1), storage.get("save_trial_latest", 2)
    return Keep(best=int(best), latest=max(int(latest), 2))
