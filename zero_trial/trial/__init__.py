"""The trial half: the user's class, its context, and the controller that runs it. Knows nothing of
sharding."""

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
