"""``torch.ops.zero_trial``: every op of the table registered for CPU, CUDA and tensors without
data; and what each one runs as here.

Registered by schema, not by decorator: a call costs microseconds, and FakeTensor and torch.compile
know what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def _implementations(take_steps: Any, lamb_moments: Any, lamb_apply: Any, square_sum: Any) -> dict[str, Implementation]:
    """Make the ops of one kind of device, which take the arguments of their schemas."""

    def moments(p: Any, g: Any, m: Any, v: Any, *rest: Any) -> Tensor:
        *columns, multiplier, bias_correction = rest
        result: Tensor = lamb_moments(plain.tensor_steps((p, g, m, v), (), columns), multiplier, bias_correction)
        return result

    def apply(p: Any, m: Any, v: Any, out: Any, ratio: Tensor, *rest: Any) -> None:
        *columns, bias_correction = rest
        if len(p) != len(ratio):
            raise ConfigError("lists of an op have different lengths", got=f"{len(p)}, {len(ratio)}")
        # the gradient is not read
        lamb_apply(plain.tensor_steps((p, p, m, v), out, columns), ratio, bias_correction)

    own = {"square_sum": square_sum, "lamb_moments_": moments, "lamb_apply_": apply}
    return {f"{op.name}_": partial(take_steps, op) for op in OPTIMIZERS} | own


CPU = _implementations(cpu.take_steps, cpu.lamb_moments, cpu.lamb_apply, cpu.square_sum)
CUDA = _implementations(cuda.take_steps, cuda.lamb_moments, cuda.lamb_apply, cuda.square_sum)

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
    large = into.dtype is not values.dtype and into.is_cpu and values.is_cpu and into.numel() >= WORTH_ELEMENTS
    if not (large and cpu.add(into, values)):
        into.add_(values)


def report() -> dict[str, str]:
    """Return what runs the ops on ``cpu`` and on ``cuda``, and each CUDA kernel that could not be
    compiled or loaded so far. Builds the CPU library if it is missing."""
    cuda = cuda_backend()
    refused = {} if cuda.cuda is None else cuda.cuda.refused
    rows = {kernel.name: f"plain torch ({why})" for kernel, why in refused.items()}
    return {"cpu": backend().describe(), "cuda": cuda.describe(), **rows}
