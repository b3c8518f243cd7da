"""Scalars of training to TensorBoard, CSV files, Weights & Biases and Comet, as ds_config asks for them."""

from zero_trial.engine.monitor.monitor import Monitor, build_monitor

__all__ = ["Monitor", "build_monitor"]
