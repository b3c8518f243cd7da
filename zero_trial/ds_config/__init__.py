"""ds_config: a strict reader into frozen dataclasses, with the source of every value. No torch."""

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig

__all__ = ["DsConfig", "read_ds_config"]
