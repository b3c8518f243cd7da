"""Optimizers over lists of flat pieces, and one step with a gradient multiplier for any
optimizer."""

from zero_trial.ops.optimizers.fused import (
    CPUAdam,
    FusedAdagrad,
    FusedAdam,
    FusedLion,
    FusedOptimizer,
    FusedSGD,
    Muon,
    orthogonalization_flops,
)
from zero_trial.ops.optimizers.lamb import FusedLamb, TensorSegment
from zero_trial.ops.optimizers.shard_step import (
    ShardOptimizer,
    ShardUpdate,
    StepGuard,
    divides_in_kernel,
    past_engine,
    refuse_state_hooks,
    scaled_step,
    state_hooks,
    steps_otherwise,
)

__all__ = [
    "CPUAdam",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedOptimizer",
    "FusedSGD",
    "Muon",
    "ShardOptimizer",
    "ShardUpdate",
    "StepGuard",
    "TensorSegment",
    "divides_in_kernel",
    "orthogonalization_flops",
    "past_engine",
    "refuse_state_hooks",
    "scaled_step",
    "state_hooks",
    "steps_otherwise",
]
