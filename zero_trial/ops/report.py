"""Which backend each op uses here, and why: for ``zero-trial env`` and for people who wonder."""

from __future__ import annotations

from dataclasses import dataclass

from zero_trial.ops._native import backend
from zero_trial.ops.library import SCHEMAS


@dataclass(frozen=True)
class OpReport:
    """One op: what it runs as on CPU and on CUDA."""

    name: str
    cpu: str
    cuda: str = "plain torch (no CUDA kernels yet)"


def report() -> list[OpReport]:
    """All ops of ``torch.ops.zero_trial``. Builds the CPU library where that has not been done."""
    cpu = backend().describe()
    return [OpReport(name, cpu) for name in SCHEMAS]
