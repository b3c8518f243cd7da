"""The trial half: the user's class, its context, and the controller that runs it. Does not depend
on sharding.

Names are loaded on first use: `trial.runs` reads run folders without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_trial.trial.context import (
        HParams,
        ModelParallelUnit,
        ZeroTrialContext,
        make_data_parallel_mpu,
        make_engine_mpu,
    )
    from zero_trial.trial.controller import Controller
    from zero_trial.trial.data import DataLoader
    from zero_trial.trial.metrics import MetricReducer, Reducer
    from zero_trial.trial.settings import Batch, Epoch, Keep, Record, TrainSettings
    from zero_trial.trial.trial import TrialCallback, ZeroTrial

_MODULES = {
    "context": ("HParams", "ModelParallelUnit", "ZeroTrialContext", "make_data_parallel_mpu", "make_engine_mpu"),
    "controller": ("Controller",),
    "data": ("DataLoader",),
    "metrics": ("MetricReducer", "Reducer"),
    "settings": ("Batch", "Epoch", "Keep", "Record", "TrainSettings"),
    "trial": ("TrialCallback", "ZeroTrial"),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "Batch",
    "Controller",
    "DataLoader",
    "Epoch",
    "HParams",
    "Keep",
    "MetricReducer",
    "ModelParallelUnit",
    "Record",
    "Reducer",
    "TrainSettings",
    "TrialCallback",
    "ZeroTrial",
    "ZeroTrialContext",
    "make_data_parallel_mpu",
    "make_engine_mpu",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
