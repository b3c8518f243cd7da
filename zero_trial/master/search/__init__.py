"""How an experiment's hyperparameters are searched: single, random, grid and adaptive_asha as pure
state machines.
"""

from zero_trial.master.search.searcher import (
    Action,
    Create,
    ExitReason,
    MetricMissing,
    PlannedTrials,
    Searcher,
    Shutdown,
    Stop,
    build,
    restore,
)

__all__ = [
    "Action",
    "Create",
    "ExitReason",
    "MetricMissing",
    "PlannedTrials",
    "Searcher",
    "Shutdown",
    "Stop",
    "build",
    "restore",
]
