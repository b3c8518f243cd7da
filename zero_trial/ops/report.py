"""Which backend each op uses here, and why: for ``zero-trial env``, for ``python -m zero_trial.ops``, and for people who wonder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zero_trial.ops import many
from zero_trial.ops._native import backend
from zero_trial.ops.cuda_backend import cuda_backend
from zero_trial.ops.library import SCHEMAS


@dataclass(frozen=True)
class OpReport:
    """One op: what it runs as on CPU and on CUDA."""

    name: str
    cpu: str
    cuda: str


# Over many tensors, CPU runs the single op on each; these have no kernel of their own there.
_PLAIN_ON_CPU = ("step_control_", "copy_many_")


def report() -> list[OpReport]:
    """All ops of ``torch.ops.zero_trial``. Builds the CPU library where that has not been done; CUDA kernels are compiled when first used."""
    cpu, cuda = backend().describe(), cuda_backend().describe()
    names = [*SCHEMAS, *many.SCHEMAS]
    return [OpReport(name, "torch's own kernels" if name in _PLAIN_ON_CPU else cpu, cuda) for name in names]


def refused() -> dict[str, str]:
    """CUDA kernels that could not be compiled or loaded in this process so far, and why."""
    cuda = cuda_backend().cuda
    return {} if cuda is None else {kernel.name: why for kernel, why in cuda.refused.items()}


def as_json(lines: Sequence[OpReport]) -> str:
    """For programs."""
    return json.dumps({"ops": [asdict(line) for line in lines], "refused": refused()})


def as_text(lines: Sequence[OpReport]) -> str:
    """For people: a line per op, and one per CUDA kernel that could not be had."""
    width = max(len(line.name) for line in lines)
    rows = [f"{line.name:<{width}}  CPU: {line.cpu}; CUDA: {line.cuda}" for line in lines]
    return "\n".join([*rows, *(f"{name}: {why}" for name, why in refused().items())])
