"""The ops on CPU tensors: one call of the native library, or plain torch if the library is missing
or does not support the tensors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cpu_library, plain
from zero_trial.ops.spec import CODES, NONE, OPTIMIZERS, OptimizerOp

# ``struct ZtCall`` of csrc/cpu/call.h: isa, threads, n, p, g, type of g, two states, out, its type,
# whether states are in bf16, key and place of the noise; then the fields of the op's struct as
# doubles. Packing one block and passing one pointer takes a third of the time of passing twenty
# arguments through ctypes.
_HEAD = struct.Struct("=13q")
_FIELDS = {op.name: struct.Struct(f"={op.fields}d") for op in OPTIMIZERS}

# For sums of two parts, use the kernel from this many bytes. Below, torch's one pass is as fast (13
# against 9 microseconds for 256 KiB); the kernel writes large sums past the caches (8.4 against
# 10.4 milliseconds for 64 MiB).
WORTH_BYTES = 16 << 20

_SUMMED = {**CODES, torch.float64: 3}

# ``out = parts[0] + parts[1] + ...`` from left to right; 16-bit parts are added in fp32 and rounded
# once. ``out`` may be one of them.
Sum = Callable[[Sequence[Tensor], Tensor], None]


def take_steps(op: OptimizerOp, *given: Any) -> None:
    """Step each tensor of an op: one call of the kernel, or plain torch."""
    native = cpu_library.backend().native
    steps, shared = plain.steps_of(op, given)
    for step in steps:
        p, g, (a, *b), out, own, noise, takes = step
        if native is None or not (takes and p.is_cpu and (out is None or out.dtype is not torch.float32)):
            plain.take_step(op, step, shared)
            continue
        low, copied = (0, NONE) if out is None else (out.data_ptr(), CODES[out.dtype])
        head = (native.isa, torch.get_num_threads(), p.numel(), p.data_ptr(), g.data_ptr(), CODES[g.dtype])
        states = (a.data_ptr(), b[0].data_ptr() if b else 0)
        call = _HEAD.pack(*head, *states, low, copied, noise is not None, *(noise or (0, 0)))
        getattr(native.library, f"zt_{op.name}")(call + _FIELDS[op.name].pack(*op.scalars(*own, *shared)))


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, non-finite if an element is. Reads ``x`` once."""
    native = cpu_library.backend().native
    if native is None or x.dtype not in CODES or not x.is_contiguous():
        return plain.square_sum(x)
    total = ctypes.c_double()
    arguments = (native.isa, torch.get_num_threads(), x.numel(), x.data_ptr(), CODES[x.dtype])
    if native.library.zt_square_sum(*arguments, ctypes.byref(total)):
        raise KernelUnavailable("no memory for the partial sums", where="square_sum", got=f"{x.numel()} elements")
    return torch.tensor(total.value, dtype=torch.float64)


def add(into: Tensor, x: Tensor) -> bool:
    """Add ``x``, of another dtype, to ``into``, rounded once; return False without a kernel."""
    native = cpu_library.backend().native
    known = into.dtype in CODES and x.dtype in CODES and into.is_contiguous() and x.is_contiguous()
    if native is None or not known:
        return False
    types = (into.data_ptr(), CODES[into.dtype], x.data_ptr(), CODES[x.dtype])
    native.library.zt_add(native.isa, torch.get_num_threads(), x.numel(), *types)
    return True


def native_sum(otherwise: Sum) -> Sum:
    """Make a sum of contiguous CPU tensors of one dtype and size in one pass, with the bits of
    ``otherwise``.

    Not an op of ``torch.ops.zero_trial``: the sum may be written over one of the parts, which a
    schema cannot express.

    Args:
        otherwise: sums the tensors that the kernel does not support.
    """

    def add(parts: Sequence[Tensor], out: Tensor) -> None:
        worth = len(parts) > 2 or (len(parts) == 2 and out.nbytes >= WORTH_BYTES)
        native, kind = cpu_library.backend().native if worth else None, _SUMMED.get(out.dtype)
        if native is None or kind is None:
            otherwise(parts, out)
            return
        places = struct.pack(f"={len(parts)}q", *[part.data_ptr() for part in parts])
        native.library.zt_sum(
            native.isa, torch.get_num_threads(), out.numel(), len(parts), places, kind, out.data_ptr()
        )

    return add
