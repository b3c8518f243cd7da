"""``torch.ops.zero_trial``: registers every op of the table for CPU, CUDA and tensors without
data, and reports which implementation runs each of them.

Ops are registered by schema, not by decorator: a call costs microseconds, and FakeTensor and
torch.compile know which arguments are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import cpu, cuda
from zero_trial.ops.cpu_library import backend
from zero_trial.ops.cuda_runtime import cuda_backend
from zero_trial.ops.spec import OPTIMIZERS, SCHEMAS

Implementation = Callable[..., Any]

# For sums of two dtypes, use the kernel from this many elements: below, torch's add_ is as fast
# (measured 11 against 19 microseconds at 64 Ki elements, 46 against 38 at 256 Ki).
WORTH_ELEMENTS = 1 << 18


CPU: dict[str, Implementation] = {f"{op.name}_": partial(cpu.take_steps, op) for op in OPTIMIZERS}
CPU["square_sum"] = cpu.square_sum
CUDA: dict[str, Implementation] = {f"{op.name}_": partial(cuda.take_steps, op) for op in OPTIMIZERS}
CUDA["square_sum"] = cuda.square_sum


def _register() -> torch.library.Library:
    """Register all ops; the registrations last as long as the returned object."""
    library = torch.library.Library("zero_trial", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, CPU[name], "CPU")
        library.impl(name, CUDA[name], "CUDA")
        torch.library.register_fake(
            f"zero_trial::{name}", _sum_of if name == "square_sum" else _on_one_device, lib=library
        )
    return library


def _sum_of(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)


def _on_one_device(*given: object) -> None:
    """Refuse to mix an op's tensors with and without data: a step would do nothing."""
    found = {x.device for each in given for x in (each if isinstance(each, list) else [each]) if isinstance(x, Tensor)}
    if len(found) > 1:
        raise ConfigError("tensors of an op are on different devices", got=", ".join(sorted(map(str, found))))


LIBRARY = _register()

# The ops; importing them from here registers them.
OPS = torch.ops.zero_trial


def accumulate(into: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``into``, of the same shape; kernel and torch give the same bits if
    ``into`` is the wider one.

    torch's ``add_`` on CPU first widens all of ``values`` in a temporary (4 bytes per element;
    above 32 MiB its pages are new each time, which takes ten times as long as the sum itself). The
    native kernel makes none.
    """
    large = into.dtype is not values.dtype and into.is_cpu and values.is_cpu and into.numel() >= WORTH_ELEMENTS
    if not (large and cpu.add(into, values)):
        into.add_(values)


def report() -> dict[str, str]:
    """Return what runs the ops on ``cpu`` and on ``cuda``, and each CUDA kernel that could not be
    compiled or loaded so far. Builds the CPU library if it is missing."""
    cuda = cuda_backend()
    refused = {} if cuda.native is None else cuda.native.refused
    rows = {kernel.name: f"plain torch ({why})" for kernel, why in refused.items()}
    return {"cpu": backend().describe(), "cuda": cuda.describe(), **rows}
