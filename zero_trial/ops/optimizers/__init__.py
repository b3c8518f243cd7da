"""Optimizers over lists of flat pieces, and one step with a gradient multiplier for any
optimizer."""

from zero_trial.ops.optimizers.fused import CPUAdam, FusedAdagrad, FusedAdam, FusedLion, FusedOptimizer, FusedSGD, Lion
from zero_trial.ops.optimizers.lamb import FusedLamb, TensorSegment
from zero_trial.ops.optimizers.muon import Muon, orthogonalization_flops
from zero_trial.ops.optimizers.shard_step import (
    DeviceScalars,
    ShardOptimizer,
    ShardUpdate,
    StepGuard,
    device_scaled_step,
    divides_in_kernel,
    past_engine,
    refuse_state_hooks,
    scaled_step,
    state_hooks,
    steps_otherwise,
    supports_device_scalars,
    undo_step,
)

__all__ = [
    "CPUAdam",
    "DeviceScalars",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedOptimizer",
    "FusedSGD",
    "Lion",
    "Muon",
    "ShardOptimizer",
    "ShardUpdate",
    "StepGuard",
    "TensorSegment",
    "device_scaled_step",
    "divides_in_kernel",
    "orthogonalization_flops",
    "past_engine",
    "refuse_state_hooks",
    "scaled_step",
    "state_hooks",
    "steps_otherwise",
    "supports_device_scalars",
    "undo_step",
]
