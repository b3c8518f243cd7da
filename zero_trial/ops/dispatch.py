"""Adding up gradients of one dtype in a buffer of another, by whoever is faster."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import cuda, plain
from zero_trial.ops.cpu import SCHEMAS, adagrad_, adam_, add_many_, lamb_apply_, lamb_moments_, lion_, sgd_, square_sum
from zero_trial.ops.cpu_library import backend
from zero_trial.ops.cuda_runtime import cuda_backend

# Below this torch's add_ is as fast: measured 11 against 19 microseconds at 64 Ki elements, 46 against 38 at 256 Ki.
WORTH_ELEMENTS = 1 << 18


def accumulate(into: Tensor, values: Tensor) -> None:
    """``into += values``, of the same shape; the same bits whoever does it, as long as ``into`` is the wider one.

    torch's ``add_`` on CPU widens all of ``values`` in a temporary first (4 bytes per element; above 32 MiB each page of it is new: ten times
    the time of the sum itself). The native kernel has none.
    """
    if into.dtype is values.dtype or not into.is_cpu or into.numel() < WORTH_ELEMENTS:
        into.add_(values)
    else:
        OPS.add_many_([into], [values])


# Which backend each op uses here, and why: for ``zero-trial env``, for ``python -m zero_trial.ops``, and for people who wonder.


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
    names = [*SCHEMAS, *plain.SCHEMAS]
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


def _register() -> torch.library.Library:
    """The library object: its registrations last as long as it lives."""
    library = torch.library.Library("zero_trial", "DEF")
    cpu = {"adam_": adam_, "lion_": lion_, "adagrad_": adagrad_, "sgd_": sgd_, "square_sum": square_sum}
    in_turn = {
        f"{name[:-1]}_many_": partial(getattr(plain, f"{name[:-1]}_many_"), step)
        for name, step in cpu.items()
        if name != "square_sum"
    }
    own = {"lamb_moments_": lamb_moments_, "lamb_apply_": lamb_apply_, "add_many_": add_many_}
    fakes: dict[str, Callable[..., Tensor | None]] = {
        "square_sum": lambda x: x.new_empty((), dtype=torch.float64),
        "lamb_moments_": lambda p, *_: p[0].new_empty((2, len(p)), dtype=torch.float64),
    }
    for name, schema in (SCHEMAS | plain.SCHEMAS).items():
        library.define(name + schema)
        library.impl(name, getattr(cuda, name), "CUDA")
        library.impl(name, (cpu | in_turn | own).get(name) or getattr(plain, name), "CPU")
        torch.library.register_fake(f"zero_trial::{name}", fakes.get(name, _on_one_device), lib=library)
    return library


def _on_one_device(*given: object) -> None:
    """What the ops do to tensors without data. Without the check one such tensor among others would make a step do nothing at all."""
    found = {x.device for each in given for x in (each if isinstance(each, list) else [each]) if isinstance(x, Tensor)}
    if len(found) > 1:
        raise ConfigError("tensors of an op on different devices", got=", ".join(sorted(map(str, found))))


LIBRARY = _register()


# The ops; who takes them from here has them registered.
OPS = torch.ops.zero_trial
