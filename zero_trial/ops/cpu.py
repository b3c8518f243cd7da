"""The ops on CPU tensors: one call of the native library, or plain torch where there is none or
where it does not take the tensors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import cpu_library, plain
from zero_trial.ops.arguments import addresses, check_step, code, no_derivative
from zero_trial.ops.cpu_library import CPULibrary
from zero_trial.ops.spec import BF16, CODES, FP32, NONE, OptimizerOp, lamb_scalars

_LOW = (torch.bfloat16, torch.float16)

# ``struct ZtCall`` of csrc/cpu/call.h: isa, threads, n, p, g, type of g, two states, out, its type,
# found_inf; then the fields of the op's struct as doubles. To pack one block and pass one pointer
# takes a third of the time of passing twenty arguments through ctypes.
_HEAD = "=11q"
_NARROW = "=4q"  # ``struct ZtNarrowCall`` up to its ZtCall: two states, key, first
_LAMB = struct.Struct("=8d")  # LAMB's fields of ZtCall

# Bytes of a sum of two parts from which the kernel is worth it. Below, torch's one pass is as fast
# (13 against 9 microseconds for 256 KiB); large sums the kernel writes past the caches (8.4 against
# 10.4 milliseconds for 64 MiB).
WORTH_BYTES = 16 << 20

_SUMMED = {**CODES, torch.float64: 3}

# ``out = parts[0] + parts[1] + ...`` from left to right; 16-bit parts are added in fp32 and rounded
# once. ``out`` may be one of them.
Sum = Callable[[Sequence[Tensor], Tensor], None]


def step_of(op: OptimizerOp) -> plain.Step:
    """Make the op over one tensor; it takes the arguments of its schema. Written for few
    microseconds."""
    end, two, step_at = 2 + len(op.states), len(op.states) == 2, op.step_at
    scalars, call, entry = op.scalars, struct.Struct(f"{_HEAD}{op.fields}d").pack, f"zt_{op.name}"
    fallback, threads = plain.step_of(op), torch.get_num_threads

    def step(*given: Any) -> None:
        native, p, g, a, out, found_inf = cpu_library.backend().native, *given[:3], *given[end : end + 2]
        b: Any = given[3] if two else None
        numbers = given[end + 2 :]
        if step_at is not None and not numbers[step_at] >= 1:
            op.check_step(numbers[step_at])
        if not takes(p, g, (a, b) if two else (a,), out, found_inf) or native is None:
            fallback(*given)
            return
        n, stored = p.numel(), CODES[g.dtype]
        low, copied = (0, NONE) if out is None else (out.data_ptr(), CODES[out.dtype])
        starts = (p.data_ptr(), g.data_ptr(), a.data_ptr(), b.data_ptr() if two else 0, low)
        check_step(starts, n, stored, copied)
        flag = 0 if found_inf is None else found_inf.data_ptr()
        head = (native.isa, threads(), n, starts[0], starts[1], stored, starts[2], starts[3], low, copied, flag)
        getattr(native.library, entry)(call(*head, *scalars(*numbers)))

    return step


def narrow_of(op: OptimizerOp) -> plain.Step:
    """Make the op over many tensors whose states are in bf16: one call each."""
    call, entry = struct.Struct(f"{_NARROW}{_HEAD[1:]}{op.fields}d").pack, f"zt_narrow_{op.name}"

    def steps(*given: Any) -> None:
        native = cpu_library.backend().native
        calls, found_inf, factor, shared = plain.narrow_calls(op, given)
        if native is None or not all(_takes_narrow(each, found_inf) for each in calls):
            if not plain.skips(found_inf):
                plain.step_narrow(op, calls, factor, shared)
            return
        shared[op.multiplier_at] = plain.times(shared[op.multiplier_at], factor)
        flag = 0 if found_inf is None else found_inf.data_ptr()
        for each in calls:
            n, stored, copied = each.p.numel(), CODES[each.g.dtype], code(each.out)
            a, b = addresses(each.states)
            starts = (each.p.data_ptr(), each.g.data_ptr(), a, b, 0 if each.out is None else each.out.data_ptr())
            check_step(starts, n, stored, copied, state=BF16)
            head = (native.isa, torch.get_num_threads(), n, *starts[:2], stored, 0, 0, starts[4], copied, flag)
            getattr(native.library, entry)(call(a, b, each.key, each.first, *head, *op.scalars(*each.own, *shared)))

    return steps


def _takes_narrow(call: plain.NarrowCall, found_inf: Tensor | None) -> bool:
    """Return whether the native kernels take the tensors of one call. Raises ConfigError for what
    no implementation takes."""
    return takes(call.p, call.g, (), call.out, found_inf) and all(x.is_contiguous() and x.is_cpu for x in call.states)


def takes(p: Tensor, g: Tensor, states: Sequence[Tensor], out: Tensor | None, found_inf: Tensor | None) -> bool:
    """Return whether the native kernels take these tensors. Raises ConfigError for what no
    implementation takes."""
    n = p.numel()
    if g.numel() != n:
        raise _other_size("gradient", g, n)
    if p.requires_grad and torch.is_grad_enabled():
        raise no_derivative()
    takes = p.dtype is torch.float32 and p.is_contiguous() and g.dtype in CODES and g.is_contiguous() and g.is_cpu
    for state in states:
        if state.numel() != n:
            raise _other_size("state" if state is states[0] else "second state", state, n)
        takes = takes and state.dtype is torch.float32 and state.is_contiguous() and state.is_cpu
    if out is not None:
        if out.numel() != n:
            raise _other_size("rounded copy", out, n)
        takes = takes and out.dtype in _LOW and out.is_contiguous() and out.is_cpu
    if found_inf is not None:
        takes = takes and found_inf.dtype is torch.float32 and found_inf.numel() == 1 and found_inf.is_cpu
    if not takes:
        _refuse((p, g, *states, *(() if out is None else (out,))), found_inf)
    return takes


def _refuse(tensors: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Raise ConfigError for what plain torch would compute nonsense from, or fail on without a
    reason."""
    if not all(tensor.is_floating_point() for tensor in tensors):
        got = ", ".join(str(tensor.dtype) for tensor in tensors)
        raise ConfigError("an optimizer step works on real floating point numbers", got=got)
    alike = len({tensor.shape for tensor in tensors}) == 1
    if not alike and not all(tensor.is_contiguous() for tensor in tensors):
        got = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError("tensors of different shapes that are not contiguous have no common order", got=got)
    if found_inf is not None and found_inf.numel() != 1:
        raise ConfigError("found_inf is one number", got=f"{found_inf.numel()} elements", expected=1)


def _other_size(name: str, tensor: Tensor, n: int) -> ConfigError:
    return ConfigError(
        f"the {name} of an optimizer step has another size than the parameter", got=tensor.numel(), expected=n
    )


def call_head(
    native: CPULibrary,
    n: int,
    starts: tuple[int, int, int, int, int],
    stored: int,
    copied: int,
    found_inf: Tensor | None,
) -> bytes:
    """Pack the head of a ZtCall. ``starts``: addresses of parameter, gradient, two states and copy,
    0 for none."""
    p, g, a, b, low = starts
    flag = 0 if found_inf is None else found_inf.data_ptr()
    return struct.pack(_HEAD, native.isa, torch.get_num_threads(), n, p, g, stored, a, b, low, copied, flag)


def lamb_moments_(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], found_inf: Tensor | None, factor: Tensor | None,
    beta1: list[float], beta2: list[float], eps: list[float], weight_decay: list[float], step: list[float],
    multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """As :func:`zero_trial.ops.plain.lamb_moments_`, which updates what the kernel does not
    take."""
    native = cpu_library.backend().native
    numbers = (beta1, beta2, eps, weight_decay, step)
    plain.same_sizes(p, g, m, v)
    plain.same_lengths(p, *numbers)
    if native is None or not all(takes(x, h, (y, z), None, found_inf) for x, h, y, z in zip(p, g, m, v, strict=True)):
        return plain.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    multiplier = plain.times(multiplier, factor)
    calls = []
    for (x, h, y, z), own in zip(zip(p, g, m, v, strict=True), zip(*numbers, strict=True), strict=True):
        starts = (x.data_ptr(), h.data_ptr(), y.data_ptr(), z.data_ptr(), 0)
        check_step(starts, x.numel(), CODES[h.dtype], NONE, uses="rrwwr")
        calls.append(call_head(native, x.numel(), starts, CODES[h.dtype], NONE, found_inf))
        calls.append(_LAMB.pack(*lamb_scalars((0.0, *own), multiplier, bias_correction)))
    squares = torch.empty(2, len(p), dtype=torch.float64)
    if native.library.zt_lamb_moments(b"".join(calls), len(p), squares.data_ptr()):
        raise KernelUnavailable("no memory for the partial sums", where="lamb_moments_", got=f"{len(p)} tensors")
    return squares


def lamb_apply_(
    p: list[Tensor], m: list[Tensor], v: list[Tensor], out: list[Tensor], found_inf: Tensor | None, ratio: Tensor,
    lr: list[float], beta1: list[float], beta2: list[float], eps: list[float], weight_decay: list[float],
    step: list[float], bias_correction: bool,
) -> None:  # fmt: skip
    """As :func:`zero_trial.ops.plain.lamb_apply_`, which updates what the kernel does not take."""
    native = cpu_library.backend().native
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    plain.same_sizes(p, m, v, *([out] if out else []))
    plain.same_lengths(p, ratio, *numbers)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    if (
        native is None
        or ratio.dtype != torch.float32
        or not all(takes(x, x, (y, z), o, found_inf) for x, y, z, o in zip(p, m, v, low, strict=True))
    ):
        plain.lamb_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    rows = zip(zip(p, m, v, low, ratio.tolist(), strict=True), zip(*numbers, strict=True), strict=True)
    calls = []
    for (x, y, z, o, each), own in rows:
        starts = (x.data_ptr(), 0, y.data_ptr(), z.data_ptr(), 0 if o is None else o.data_ptr())
        check_step(starts, x.numel(), NONE, code(o), uses="wrrrw")
        calls.append(call_head(native, x.numel(), starts, FP32, code(o), found_inf))
        calls.append(_LAMB.pack(*lamb_scalars(own, each, bias_correction)))
    native.library.zt_lamb_apply(b"".join(calls), len(p))


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, a scalar tensor; not finite if and only if an element
    is not. Reads ``x`` once."""
    native = cpu_library.backend().native
    if native is None or x.dtype not in CODES or not x.is_contiguous():
        if x.is_complex():
            raise ConfigError("square_sum works on real numbers", got=x.dtype)
        return plain.square_sum(x)
    total = ctypes.c_double()
    arguments = (native.isa, torch.get_num_threads(), x.numel(), x.data_ptr(), CODES[x.dtype])
    if native.library.zt_square_sum(*arguments, ctypes.byref(total)):
        raise KernelUnavailable("no memory for the partial sums", where="square_sum", got=f"{x.numel()} elements")
    return torch.tensor(total.value, dtype=torch.float64)


def add_many_(into: list[Tensor], source: list[Tensor]) -> None:
    """Add each source to its target; the sum is rounded once.

    Native for pairs of different dtypes, which torch's ``add_`` first converts to one dtype in a
    temporary (8 Mi elements: 9 ns per element against 0.3). Equal dtypes, and copies of any, are as
    fast in torch.
    """
    plain.same_sizes(into, source)
    native = cpu_library.backend().native
    rest: list[int] = []
    for index, (target, x) in enumerate(zip(into, source, strict=True)):
        known = target.dtype is not x.dtype and target.dtype in CODES and x.dtype in CODES and x.is_cpu
        if native is None or not known or not target.is_contiguous() or not x.is_contiguous():
            rest.append(index)
            continue
        types = (target.data_ptr(), CODES[target.dtype], x.data_ptr(), CODES[x.dtype])
        native.library.zt_add(native.isa, torch.get_num_threads(), x.numel(), *types)
    if rest:
        plain.add_many_([into[index] for index in rest], [source[index] for index in rest])


def native_sum(otherwise: Sum) -> Sum:
    """Make a sum of contiguous CPU tensors of one dtype and size in one pass, with the bits of
    ``otherwise``.

    Not an op of ``torch.ops.zero_trial``: the sum may be written over one of the parts, which a
    schema cannot express.

    Args:
        otherwise: adds up what the kernel does not take.
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
