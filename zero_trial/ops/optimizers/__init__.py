"""Optimizers over lists of flat pieces, and one step with a gradient multiplier for any optimizer."""

from zero_trial.ops.optimizers.fused import CPUAdam, FusedAdam, FusedLion
from zero_trial.ops.optimizers.lamb import FusedLamb, Segment
from zero_trial.ops.optimizers.lion import Lion
from zero_trial.ops.optimizers.pieces import PieceOptimizer, PieceWork
from zero_trial.ops.optimizers.scaled_step import fused_step, scaled_step

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "Lion",
    "PieceOptimizer",
    "PieceWork",
    "Segment",
    "fused_step",
    "scaled_step",
]
