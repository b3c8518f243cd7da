"""``torch.ops.zero_trial``: every op of the table registered for CPU, CUDA and tensors without
data; and what each one runs as here.

Registered by schema, not by decorator: a call costs microseconds, and FakeTensor and torch.compile
know what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import cpu, cuda, plain
from zero_trial.ops.cpu_library import backend
from zero_trial.ops.cuda_runtime import cuda_backend
from zero_trial.ops.spec import OPTIMIZERS, SCHEMAS

Implementation = Callable[..., Any]

# Elements of a sum of two dtypes from which the kernel is worth it: below, torch's add_ is as fast
# (measured 11 against 19 microseconds at 64 Ki elements, 46 against 38 at 256 Ki).
WORTH_ELEMENTS = 1 << 18

# Over many tensors CPU runs the op over one tensor on each: calls are a loop either way.
CPU: dict[str, Implementation] = {op.single: cpu.step_of(op) for op in OPTIMIZERS}
CPU |= {op.many: plain.in_turn(op, CPU[op.single]) for op in OPTIMIZERS}
CPU |= {op.narrow: cpu.narrow_of(op) for op in OPTIMIZERS}
CPU |= {
    "square_sum": cpu.square_sum,
    "lamb_moments_": cpu.lamb_moments_,
    "lamb_apply_": cpu.lamb_apply_,
    "step_control_": plain.step_control_,
    "copy_many_": plain.copy_many_,
    "add_many_": cpu.add_many_,
}
_PLAIN_ON_CPU = ("step_control_", "copy_many_")  # torch's own kernels are as fast

CUDA: dict[str, Implementation] = {op.single: cuda.step_of(op) for op in OPTIMIZERS}
CUDA |= {op.many: cuda.steps_of(op) for op in OPTIMIZERS}
CUDA |= {op.narrow: cuda.narrow_of(op) for op in OPTIMIZERS}
CUDA |= {
    "square_sum": cuda.square_sum,
    "lamb_moments_": cuda.lamb_moments_,
    "lamb_apply_": cuda.lamb_apply_,
    "step_control_": cuda.step_control_,
    "copy_many_": cuda.copy_many_,
    "add_many_": cuda.add_many_,
}

_FAKES: dict[str, Implementation] = {
    "square_sum": lambda x: x.new_empty((), dtype=torch.float64),
    "lamb_moments_": lambda p, *_: p[0].new_empty((2, len(p)), dtype=torch.float64),
}


def _register() -> torch.library.Library:
    """Register all ops; the registrations last as long as the returned object."""
    library = torch.library.Library("zero_trial", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, CPU[name], "CPU")
        library.impl(name, CUDA[name], "CUDA")
        torch.library.register_fake(f"zero_trial::{name}", _FAKES.get(name, _on_one_device), lib=library)
    return library


def _on_one_device(*given: object) -> None:
    """Check the devices of an op on tensors without data: one such tensor among real ones would
    make a step do nothing at all."""
    found = {x.device for each in given for x in (each if isinstance(each, list) else [each]) if isinstance(x, Tensor)}
    if len(found) > 1:
        raise ConfigError("tensors of an op on different devices", got=", ".join(sorted(map(str, found))))


LIBRARY = _register()

# The ops; to import them from here is to have them registered.
OPS = torch.ops.zero_trial


def accumulate(into: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``into``, of the same shape; kernel and torch give the same bits if
    ``into`` is the wider one.

    torch's ``add_`` on CPU first widens all of ``values`` in a temporary (4 bytes per element;
    above 32 MiB its pages are new each time, which takes ten times as long as the sum itself). The
    native kernel makes none.
    """
    if into.dtype is values.dtype or not into.is_cpu or into.numel() < WORTH_ELEMENTS:
        into.add_(values)
    else:
        OPS.add_many_([into], [values])


@dataclass(frozen=True)
class OpReport:
    """What one op runs as, on CPU and on CUDA."""

    name: str
    cpu: str
    cuda: str


def report() -> list[OpReport]:
    """Report on all ops of ``torch.ops.zero_trial``. Builds the CPU library if it is missing; CUDA
    kernels are compiled when first used."""
    cpu, cuda = backend().describe(), cuda_backend().describe()
    return [OpReport(name, "torch's own kernels" if name in _PLAIN_ON_CPU else cpu, cuda) for name in SCHEMAS]


def refused() -> dict[str, str]:
    """Return the CUDA kernels that could not be compiled or loaded in this process so far, and
    why."""
    cuda = cuda_backend().cuda
    return {} if cuda is None else {kernel.name: why for kernel, why in cuda.refused.items()}


def as_dict(lines: Sequence[OpReport]) -> dict[str, Any]:
    """Return a report as plain values, with the CUDA kernels that were refused."""
    return {"ops": [asdict(line) for line in lines], "refused": refused()}


def as_text(lines: Sequence[OpReport]) -> str:
    """Format a report as text: a line per op, and one per CUDA kernel that could not be compiled or
    loaded."""
    width = max(len(line.name) for line in lines)
    rows = [f"{line.name:<{width}}  CPU: {line.cpu}; CUDA: {line.cuda}" for line in lines]
    return "\n".join([*rows, *(f"{name}: {why}" for name, why in refused().items())])
