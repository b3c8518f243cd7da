"""zero_trial: sharded, offloaded and pipeline-parallel training under one trial class, from a laptop CPU to a cluster."""

__version__ = "0.1.0"
