"""ds_config: read strictly into frozen dataclasses, with every value's source. Imports no torch."""

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig

__all__ = ["DsConfig", "read_ds_config"]
