"""Optimizer arithmetic: the pure-torch reference, native kernels for it, and optimizers that work on flat pieces of parameters."""

from zero_trial.ops._native import Backend, backend
from zero_trial.ops.cuda_backend import native_on
from zero_trial.ops.optimizers import CPUAdam, FusedAdagrad, FusedAdam, FusedLamb, FusedLion, FusedSGD
from zero_trial.ops.report import OpReport, report

__all__ = [
    "Backend",
    "CPUAdam",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedSGD",
    "OpReport",
    "backend",
    "native_on",
    "report",
]
