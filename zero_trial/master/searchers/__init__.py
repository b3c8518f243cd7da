"""How an experiment's hyperparameters are searched: single, random, grid and adaptive_asha as pure state machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.master.searchers.actions import Action, Create, ExitReason, Shutdown, Stop
from zero_trial.master.searchers.searcher import MetricMissing, Searcher

__all__ = [
    "Action",
    "Create",
    "ExitReason",
    "MetricMissing",
    "Searcher",
    "Shutdown",
    "Stop",
    "build",
    "restore",
]


def build(searcher_config: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> Searcher:
    """The search of a completed config's ``searcher`` and ``hyperparameters``; ``seed`` is ``reproducibility.experiment_seed``."""
    raise NotImplementedError


def restore(
    searcher_config: Mapping[str, Any], hyperparameters: Mapping[str, Any], snapshot: Mapping[str, Any]
) -> Searcher:
    """The search as it was when ``snapshot`` was taken, with the same config."""
    raise NotImplementedError
