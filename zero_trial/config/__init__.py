"""Configuration: ds_config and the experiment YAML, read strictly into frozen dataclasses. Imports no torch."""

from zero_trial.config.batch import BatchTriple, solve_batch
from zero_trial.config.overlay import overwrite_ds_config
from zero_trial.config.reader import read_ds_config
from zero_trial.config.sections import DsConfig

__all__ = ["BatchTriple", "DsConfig", "overwrite_ds_config", "read_ds_config", "solve_batch"]
