"""How an experiment's hyperparameters are searched: single, random, grid and adaptive_asha as pure state machines."""

from zero_trial.master.searchers.actions import Action, Create, ExitReason, Shutdown, Stop
from zero_trial.master.searchers.build import build, restore
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
