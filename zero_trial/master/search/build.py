"""From a completed experiment's ``searcher`` section to the search that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.master.search.adaptive_asha import AdaptiveAsha, Budget
from zero_trial.master.search.searcher import Draws, GridSearch, RandomSearch, Searcher, SingleSearch

MAX_CONCURRENT_TRIALS = 16
"""Determined's default; 0 means as many as there are."""


def build(searcher_config: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> Searcher:
    """The search of a completed config's ``searcher`` and ``hyperparameters``; ``seed`` is ``reproducibility.experiment_seed``.

    Raises ConfigError for what ``experiment.complete`` would have refused.
    """
    draws = Draws(seed)
    concurrent = _or(searcher_config.get("max_concurrent_trials"), MAX_CONCURRENT_TRIALS)
    match searcher_config.get("name"):
        case "single":
            return SingleSearch(hyperparameters, draws)
        case "random":
            return RandomSearch(hyperparameters, draws, searcher_config["max_trials"], concurrent)
        case "grid":
            return GridSearch(hyperparameters, draws, concurrent)
        case "adaptive_asha":
            return _adaptive_asha(searcher_config, hyperparameters, draws, concurrent)
        case other:
            expected = "single, random, grid or adaptive_asha"
            raise ConfigError("no such searcher", where="searcher.name", got=other, expected=expected)


def restore(
    searcher_config: Mapping[str, Any], hyperparameters: Mapping[str, Any], snapshot: Mapping[str, Any]
) -> Searcher:
    """The search as it was when ``snapshot`` was taken, with the same config."""
    search = build(searcher_config, hyperparameters, snapshot["draws"]["seed"])
    search.take(snapshot)
    return search


def _adaptive_asha(
    searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], draws: Draws, concurrent: int
) -> AdaptiveAsha:
    time_metric, max_time = training_length(searcher)
    budget = Budget(
        max_trials=searcher["max_trials"],
        max_time=max_time,
        mode=_or(searcher.get("mode"), "standard"),
        divisor=float(_or(searcher.get("divisor"), 4)),
        max_rungs=_or(searcher.get("max_rungs"), 5),
        max_concurrent_trials=concurrent,
        bracket_rungs=tuple(searcher.get("bracket_rungs") or ()),
    )
    return AdaptiveAsha(
        hyperparameters,
        draws,
        budget,
        metric=searcher["metric"],
        time_metric=time_metric,
        smaller_is_better=_or(searcher.get("smaller_is_better"), True),
    )


def training_length(searcher: Mapping[str, Any]) -> tuple[str, int]:
    """The time metric and how much of it a whole training is: max_time, or the older max_length."""
    length = searcher.get("max_length")
    if searcher.get("max_time") is not None:
        return str(searcher["time_metric"]), int(searcher["max_time"])
    if isinstance(length, Mapping) and len(length) == 1:
        ((unit, count),) = length.items()
        return str(unit), int(count)
    raise ConfigError("there is no training length", where="searcher.max_time", fix="Write max_time and time_metric.")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
