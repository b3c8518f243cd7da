"""Optimizers over lists of flat pieces, and one step with a gradient multiplier for any optimizer."""

from zero_trial.ops.optimizers.adagrad import FusedAdagrad
from zero_trial.ops.optimizers.fused import CPUAdam, FusedAdam, FusedLion
from zero_trial.ops.optimizers.lamb import FusedLamb, Segment
from zero_trial.ops.optimizers.lion import Lion
from zero_trial.ops.optimizers.pieces import Gate, PieceOptimizer, PieceWork
from zero_trial.ops.optimizers.scaled_step import (
    divides_in_kernel,
    fused_step,
    gated_step,
    scaled_step,
    take_back,
    takes_gates,
)
from zero_trial.ops.optimizers.sgd import FusedSGD

__all__ = [
    "CPUAdam",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedSGD",
    "Gate",
    "Lion",
    "PieceOptimizer",
    "PieceWork",
    "Segment",
    "divides_in_kernel",
    "fused_step",
    "gated_step",
    "scaled_step",
    "take_back",
    "takes_gates",
]
