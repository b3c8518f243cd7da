"""Optimizer arithmetic: pure-torch reference, native kernels, optimizers of flat pieces."""

from zero_trial.ops.cpu_library import Backend, backend
from zero_trial.ops.cuda_runtime import native_on
from zero_trial.ops.dispatch import report
from zero_trial.ops.optimizers.fused import CPUAdam, FusedAdagrad, FusedAdam, FusedLion, FusedSGD
from zero_trial.ops.optimizers.lamb import FusedLamb

__all__ = [
    "Backend",
    "CPUAdam",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedSGD",
    "backend",
    "native_on",
    "report",
]
