"""The experiment configuration as a Determined 0.38.1 master reads it."""

from zero_trial.master.expconf.cluster import ClusterDefaults
from zero_trial.master.expconf.complete import CompletedConfig, InvalidExperiment, complete

__all__ = ["ClusterDefaults", "CompletedConfig", "InvalidExperiment", "complete"]
