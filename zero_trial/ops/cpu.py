"""``torch.ops.zero_trial``: optimizer steps and sums over flat shards, native on CPU where that can be had.

Registered by schema, not by decorator: a call costs microseconds, and FakeTensor and torch.compile know what is written.

    p           parameter, changed in place; fp32 for the native kernels, any dtype in plain torch
    g           gradient in fp32, bf16 or fp16; multiplied by ``multiplier`` as it is read
    m, v, s, b  states in the parameter's dtype, changed in place
    out         receives the new parameter rounded to its own dtype (bf16 or fp16), or None
    found_inf   one-element fp32 tensor; where it is not 0 nothing is changed; or None

All tensors of a call have the same number of elements, lie on one device and do not overlap. Steps are taken outside of autograd's graph
(``torch.no_grad()``) and leave the tensors' version counters alone; sums have no derivative. A ConfigError says what does not fit.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import arguments, plain
from zero_trial.ops.cpu_library import CALL, NONE, TYPES, CPULibrary, backend

_LOW = (torch.bfloat16, torch.float16)


_OUT = "Tensor({})? out, Tensor? found_inf"


SCHEMAS = {
    "adam_": f"(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, {_OUT.format('d!')}, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, float step, float multiplier, bool decoupled) -> ()",
    "lion_": f"(Tensor(a!) p, Tensor g, Tensor(b!) m, {_OUT.format('c!')}, float lr, float beta1, float beta2, "
    "float weight_decay, float multiplier) -> ()",
    "adagrad_": f"(Tensor(a!) p, Tensor g, Tensor(b!) s, {_OUT.format('c!')}, float lr, float eps, float weight_decay, "
    "float multiplier) -> ()",
    "sgd_": f"(Tensor(a!) p, Tensor g, Tensor(b!) b, {_OUT.format('c!')}, float lr, float momentum, float dampening, "
    "float weight_decay, bool first, bool nesterov, float multiplier) -> ()",
    "square_sum": "(Tensor x) -> Tensor",
}


def takes(p: Tensor, g: Tensor, states: tuple[Tensor, ...], out: Tensor | None, found_inf: Tensor | None) -> bool:
    """Whether the native kernels can work on these tensors. Raises ConfigError where nobody could."""
    n = p.numel()
    if g.numel() != n:
        raise _other_size("gradient", g, n)
    if p.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "an optimizer step has no derivative, and the parameter requires one",
            fix="Call it under torch.no_grad().",
        )
    takes = p.dtype is torch.float32 and p.is_contiguous() and g.dtype in TYPES and g.is_contiguous() and g.is_cpu
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
    """What plain torch would compute nonsense from, or fail on without saying why."""
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


def adam_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    multiplier: float,
    decoupled: bool,
) -> None:
    """Adam (``decoupled`` False) or AdamW, step number ``step`` from 1; an infinite one corrects no bias."""
    if not step >= 1:
        raise ConfigError("steps of Adam are numbered from 1", where="adam_", got=step)
    native = backend().native
    if not takes(p, g, (m, v), out, found_inf) or native is None:
        plain.adam_(p, g, m, v, out, found_inf, lr, beta1, beta2, eps, weight_decay, step, multiplier, decoupled)
        return
    scalars = (lr, beta1, beta2, eps, weight_decay, multiplier, 1 - beta1**step, 1 - beta2**step)
    native.library.zt_adam(_pack(native, p, g, m, v, out, found_inf, *scalars, decoupled, 0))


def lion_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    multiplier: float,
) -> None:
    """Lion."""
    native = backend().native
    if not takes(p, g, (m,), out, found_inf) or native is None:
        plain.lion_(p, g, m, out, found_inf, lr, beta1, beta2, weight_decay, multiplier)
        return
    scalars = (lr, beta1, beta2, 0.0, weight_decay, multiplier, 0.0, 0.0)
    native.library.zt_lion(_pack(native, p, g, m, None, out, found_inf, *scalars, 0, 0))


def adagrad_(
    p: Tensor,
    g: Tensor,
    s: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    eps: float,
    weight_decay: float,
    multiplier: float,
) -> None:
    """Adagrad; ``lr`` with its decay already in it."""
    native = backend().native
    if not takes(p, g, (s,), out, found_inf) or native is None:
        plain.adagrad_(p, g, s, out, found_inf, lr, eps, weight_decay, multiplier)
        return
    scalars = (lr, 0.0, 0.0, eps, weight_decay, multiplier, 0.0, 0.0)
    native.library.zt_adagrad(_pack(native, p, g, s, None, out, found_inf, *scalars, 0, 0))


def sgd_(
    p: Tensor,
    g: Tensor,
    b: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    first: bool,
    nesterov: bool,
    multiplier: float,
) -> None:
    """SGD with momentum; ``first``: the buffer becomes the gradient, undamped."""
    native = backend().native
    if not takes(p, g, (b,), out, found_inf) or native is None:
        plain.sgd_(p, g, b, out, found_inf, lr, momentum, dampening, weight_decay, first, nesterov, multiplier)
        return
    scalars = (lr, 0.0, 0.0, 0.0, weight_decay, multiplier, momentum, 1.0 if first else 1.0 - dampening)
    native.library.zt_sgd(_pack(native, p, g, b, None, out, found_inf, *scalars, first, nesterov))


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares in float64, a scalar tensor; not finite if and only if an element is not. Reads ``x`` once."""
    native = backend().native
    if native is None or x.dtype not in TYPES or not x.is_contiguous():
        if x.is_complex():
            raise ConfigError("square_sum works on real numbers", got=x.dtype)
        return plain.square_sum(x)
    total = ctypes.c_double()
    arguments = (native.isa, torch.get_num_threads(), x.numel(), x.data_ptr(), TYPES[x.dtype])
    if native.library.zt_square_sum(*arguments, ctypes.byref(total)):
        raise KernelUnavailable("no memory for the partial sums", where="square_sum", got=f"{x.numel()} elements")
    return torch.tensor(total.value, dtype=torch.float64)


def add_many_(into: list[Tensor], source: list[Tensor]) -> None:
    """Each source added to its target; the sum is rounded once.

    Native for pairs of different dtypes, which torch's ``add_`` brings to one dtype in a temporary first: measured on 8 Mi elements, 0.3
    instead of 9 ns per element. Equal dtypes, and copies of any, are as fast in torch.
    """
    plain.same_sizes(into, source)
    native = backend().native
    rest: list[int] = []
    for index, (target, x) in enumerate(zip(into, source, strict=True)):
        known = target.dtype is not x.dtype and target.dtype in TYPES and x.dtype in TYPES and x.is_cpu
        if native is None or not known or not target.is_contiguous() or not x.is_contiguous():
            rest.append(index)
            continue
        types = (target.data_ptr(), TYPES[target.dtype], x.data_ptr(), TYPES[x.dtype])
        native.library.zt_add(native.isa, torch.get_num_threads(), x.numel(), *types)
    if rest:
        plain.add_many_([into[index] for index in rest], [source[index] for index in rest])


def lamb_moments_(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], found_inf: Tensor | None, factor: Tensor | None,
    beta1: list[float], beta2: list[float], eps: list[float], weight_decay: list[float], step: list[float],
    multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
    native = backend().native
    numbers = (beta1, beta2, eps, weight_decay, step)
    plain.same_sizes(p, g, m, v)
    plain.same_lengths(p, *numbers)
    if native is None or not all(takes(x, h, (y, z), None, found_inf) for x, h, y, z in zip(p, g, m, v, strict=True)):
        return plain.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    multiplier = plain.times(multiplier, factor)
    calls = []
    for (x, h, y, z), own in zip(zip(p, g, m, v, strict=True), zip(*numbers, strict=True), strict=True):
        starts = (x.data_ptr(), h.data_ptr(), y.data_ptr(), z.data_ptr(), 0)
        arguments.check_step(starts, x.numel(), TYPES[h.dtype], NONE, "rrwwr")
        calls.append(
            _block(native, x, h, starts, None, found_inf, *_lamb_scalars((0.0, *own), multiplier, bias_correction))
        )
    squares = torch.empty(2, len(p), dtype=torch.float64)
    if native.library.zt_lamb_moments(b"".join(calls), len(calls), squares.data_ptr()):
        raise KernelUnavailable("no memory for the partial sums", where="lamb_moments_", got=f"{len(p)} tensors")
    return squares


def lamb_apply_(
    p: list[Tensor], m: list[Tensor], v: list[Tensor], out: list[Tensor], found_inf: Tensor | None, ratio: Tensor,
    lr: list[float], beta1: list[float], beta2: list[float], eps: list[float], weight_decay: list[float],
    step: list[float], bias_correction: bool,
) -> None:  # fmt: skip
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    native = backend().native
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
        arguments.check_step(starts, x.numel(), NONE, NONE if o is None else TYPES[o.dtype], "wrrrw")
        calls.append(_block(native, x, x, starts, o, found_inf, *_lamb_scalars(own, each, bias_correction)))
    native.library.zt_lamb_apply(b"".join(calls), len(calls))


def _lamb_scalars(own: Sequence[float], multiplier: float, corrected: bool) -> tuple[float, ...]:
    """The numbers of a call from a tensor's ``own``: lr, beta1, beta2, eps, weight_decay, step; ``multiplier`` of the gradients, or the ratio."""
    *scalars, t = own
    inverses = (1 - scalars[1] ** t, 1 - scalars[2] ** t) if corrected else (1.0, 1.0)
    return (*scalars, multiplier, *inverses, 0, 0)


def _pack(
    native: CPULibrary,
    p: Tensor,
    g: Tensor,
    first: Tensor,
    second: Tensor | None,
    out: Tensor | None,
    found_inf: Tensor | None,
    *numbers: float,
) -> bytes:
    """The block of arguments that a step in the library reads. Raises ConfigError where tensors overlap."""
    starts = (
        p.data_ptr(),
        g.data_ptr(),
        first.data_ptr(),
        0 if second is None else second.data_ptr(),
        0 if out is None else out.data_ptr(),
    )
    arguments.check_step(starts, p.numel(), TYPES[g.dtype], NONE if out is None else TYPES[out.dtype])
    return _block(native, p, g, starts, out, found_inf, *numbers)


def _block(
    native: CPULibrary,
    p: Tensor,
    g: Tensor,
    starts: tuple[int, int, int, int, int],
    out: Tensor | None,
    found_inf: Tensor | None,
    *numbers: float,
) -> bytes:
    """The same without the check; ``starts``: addresses of parameter, gradient, two states and copy, 0 for none."""
    return CALL.pack(
        native.isa,
        torch.get_num_threads(),
        p.numel(),
        starts[0],
        starts[1],
        TYPES[g.dtype],
        starts[2],
        starts[3],
        starts[4],
        NONE if out is None else TYPES[out.dtype],
        0 if found_inf is None else found_inf.data_ptr(),
        *numbers,
    )


# The sum of what several ranks have put in, in one pass: every part is read once, and the sum written once.
#
# Not an op of ``torch.ops.zero_trial``: the sum may be written over one of the parts, which no schema can say, and
# nobody differentiates or traces it.


# Of two parts torch's one pass is as fast: 13 against 9 microseconds for 256 KiB. Large sums the kernel writes past the caches: 8.4 against 10.4
# milliseconds for 64 MiB.
WORTH_BYTES = 16 << 20


_TYPES = {**TYPES, torch.float64: 3}


# ``out = parts[0] + parts[1] + ...`` from left to right; 16-bit parts are added in fp32 and rounded once. ``out`` may be one of them.
Sum = Callable[[Sequence[Tensor], Tensor], None]


def native_sum(otherwise: Sum) -> Sum:
    """A sum of contiguous CPU tensors of one dtype and size, with the bits of ``otherwise``, which does what no kernel does."""

    def add(parts: Sequence[Tensor], out: Tensor) -> None:
        worth = len(parts) > 2 or (len(parts) == 2 and out.nbytes >= WORTH_BYTES)
        native, kind = backend().native if worth else None, _TYPES.get(out.dtype)
        if native is None or kind is None:
            otherwise(parts, out)
            return
        places = struct.pack(f"={len(parts)}q", *[part.data_ptr() for part in parts])
        native.library.zt_sum(
            native.isa, torch.get_num_threads(), out.numel(), len(parts), places, kind, out.data_ptr()
        )

    return add
