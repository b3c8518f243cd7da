"""Optimizers over lists of flat pieces, and one step with a gradient multiplier for any optimizer."""

from zero_trial.ops.optimizers.base import (
    DeviceScalars,
    ShardOptimizer,
    ShardUpdate,
    device_scaled_step,
    divides_in_kernel,
    fused_step,
    scaled_step,
    supports_device_scalars,
    undo_step,
)
from zero_trial.ops.optimizers.fused import CPUAdam, FusedAdagrad, FusedAdam, FusedLion, FusedSGD, Lion
from zero_trial.ops.optimizers.lamb import FusedLamb, TensorSegment

__all__ = [
    "CPUAdam",
    "DeviceScalars",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedSGD",
    "Lion",
    "ShardOptimizer",
    "ShardUpdate",
    "TensorSegment",
    "device_scaled_step",
    "divides_in_kernel",
    "fused_step",
    "scaled_step",
    "supports_device_scalars",
    "undo_step",
]
