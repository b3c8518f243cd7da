"""LAMB's two ops over many tensors, in plain torch and with the kernels for CPU and CUDA (You et al. 2020, Algorithm 2).

``lamb_moments_`` updates the moments of each tensor in place and returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where
skipped. ``lamb_apply_`` then takes p -= lr ratio direction, with ``ratio`` (tensors,) in fp32. Between the two, norms of a tensor that is cut over
ranks are added up. The kernels take two launches and one; they run only where they can take all tensors of a call.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import arguments, cpu_library, cuda_runtime, plain
from zero_trial.ops.arguments import (
    LaunchItem,
    check_pieces,
    check_step,
    code,
    items_of,
    one_float,
    pointer,
    table_of,
    takes,
)
from zero_trial.ops.cpu import call_head
from zero_trial.ops.cpu import takes as takes_on_cpu
from zero_trial.ops.cuda_runtime import CudaRuntime, Kernel
from zero_trial.ops.spec import CODES, FP32, NONE, pack_floats

_LAUNCH = struct.Struct("7P2q")  # ZtLambLaunch of csrc/cuda/lamb.cu
_SCALARS = struct.Struct("=8d")  # of ZtCall in csrc/cpu/call.h


def scalars(own: Sequence[float], multiplier: float, corrected: bool) -> tuple[float, ...]:
    """The fields of ZtLamb.

    Args:
        own: a tensor's lr, beta1, beta2, eps, weight decay and number of the step.
        multiplier: of the gradients; for the step itself, the ratio.
        corrected: the bias of the moments is.
    """
    lr, beta1, beta2, eps, decay, step = own
    inverses = (1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)) if corrected else (1.0, 1.0)
    return (multiplier, 1 - beta1, 1 - beta2, *inverses, eps, decay, lr)


# --- plain torch ------------------------------------------------------------------------------------------------------


def plain_moments_(
    p: Sequence[Tensor], g: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor],
    found_inf: Tensor | None, factor: Tensor | None, beta1: Sequence[float], beta2: Sequence[float],
    eps: Sequence[float], weight_decay: Sequence[float], step: Sequence[float], multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
    plain.same_sizes(p, g, m, v)
    plain.same_lengths(p, beta1, beta2, eps, weight_decay, step)
    squares = torch.zeros(2, len(p), dtype=torch.float64, device=p[0].device if p else None)
    if plain.skips(found_inf):
        return squares
    for i, (weight, gradient) in enumerate(zip(p, g, strict=True)):
        h = gradient.to(weight.dtype) * multiplier
        h = h if factor is None else h * factor.to(weight.dtype)
        m[i].add_(h - m[i], alpha=1 - beta1[i])
        v[i].add_(h * h - v[i], alpha=1 - beta2[i])
        direction = _direction(
            weight, m[i], v[i], beta1[i], beta2[i], eps[i], weight_decay[i], step[i], bias_correction
        )
        squares[0, i], squares[1, i] = plain.square_sum(weight), plain.square_sum(direction)
    return squares


def plain_apply_(
    p: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor], out: Sequence[Tensor], found_inf: Tensor | None,
    ratio: Tensor, lr: Sequence[float], beta1: Sequence[float], beta2: Sequence[float], eps: Sequence[float],
    weight_decay: Sequence[float], step: Sequence[float], bias_correction: bool,
) -> None:  # fmt: skip
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    plain.same_sizes(p, m, v, *([out] if out else []))
    if plain.skips(found_inf):
        return
    for i, weight in enumerate(p):
        direction = _direction(
            weight, m[i], v[i], beta1[i], beta2[i], eps[i], weight_decay[i], step[i], bias_correction
        )
        weight.sub_(direction * (ratio[i].to(weight.dtype) * lr[i]))
        if out:
            out[i].copy_(weight)


def _direction(
    p: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, eps: float, decay: float, t: float, corrected: bool
) -> Tensor:
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if corrected else (1.0, 1.0)
    return (m / c1) / ((v / c2).sqrt() + eps) + decay * p  # You et al. 2020, Algorithm 2, lines 9 to 11


# --- CPU --------------------------------------------------------------------------------------------------------------


def cpu_moments_(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], found_inf: Tensor | None, factor: Tensor | None,
    beta1: list[float], beta2: list[float], eps: list[float], weight_decay: list[float], step: list[float],
    multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
    native = cpu_library.backend().native
    numbers = (beta1, beta2, eps, weight_decay, step)
    plain.same_sizes(p, g, m, v)
    plain.same_lengths(p, *numbers)
    if native is None or not all(
        takes_on_cpu(x, h, (y, z), None, found_inf) for x, h, y, z in zip(p, g, m, v, strict=True)
    ):
        return plain_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    multiplier = plain.times(multiplier, factor)
    calls = []
    for (x, h, y, z), own in zip(zip(p, g, m, v, strict=True), zip(*numbers, strict=True), strict=True):
        starts = (x.data_ptr(), h.data_ptr(), y.data_ptr(), z.data_ptr(), 0)
        check_step(starts, x.numel(), CODES[h.dtype], NONE, "rrwwr")
        calls.append(call_head(native, x.numel(), starts, CODES[h.dtype], NONE, found_inf))
        calls.append(_SCALARS.pack(*scalars((0.0, *own), multiplier, bias_correction)))
    squares = torch.empty(2, len(p), dtype=torch.float64)
    if native.library.zt_lamb_moments(b"".join(calls), len(p), squares.data_ptr()):
        raise KernelUnavailable("no memory for the partial sums", where="lamb_moments_", got=f"{len(p)} tensors")
    return squares


def cpu_apply_(
    p: list[Tensor], m: list[Tensor], v: list[Tensor], out: list[Tensor], found_inf: Tensor | None, ratio: Tensor,
    lr: list[float], beta1: list[float], beta2: list[float], eps: list[float], weight_decay: list[float],
    step: list[float], bias_correction: bool,
) -> None:  # fmt: skip
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    native = cpu_library.backend().native
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    plain.same_sizes(p, m, v, *([out] if out else []))
    plain.same_lengths(p, ratio, *numbers)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    if (
        native is None
        or ratio.dtype != torch.float32
        or not all(takes_on_cpu(x, x, (y, z), o, found_inf) for x, y, z, o in zip(p, m, v, low, strict=True))
    ):
        plain_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    rows = zip(zip(p, m, v, low, ratio.tolist(), strict=True), zip(*numbers, strict=True), strict=True)
    calls = []
    for (x, y, z, o, each), own in rows:
        starts = (x.data_ptr(), 0, y.data_ptr(), z.data_ptr(), 0 if o is None else o.data_ptr())
        check_step(starts, x.numel(), NONE, code(o), "wrrrw")
        calls.append(call_head(native, x.numel(), starts, FP32, code(o), found_inf))
        calls.append(_SCALARS.pack(*scalars(own, each, bias_correction)))
    native.library.zt_lamb_apply(b"".join(calls), len(p))


# --- CUDA -------------------------------------------------------------------------------------------------------------


def _ready(
    pieces: Sequence[LaunchItem], kernels: Sequence[Kernel], flags: Sequence[Tensor | None], where: torch.device
) -> CudaRuntime | None:
    """The runtime, if it can launch the kernels on all items at once."""
    cuda = cuda_runtime.cuda_backend().cuda
    kinds = {(code(q.g), code(q.out), q.p.device) if takes(q) and q.p.numel() else None for q in pieces}
    alike = len(kinds) == 1 and None not in kinds and all(one_float(flag, where) for flag in flags)
    if cuda is None or where.type != cuda.kind or not alike or cuda.capturing(where):
        return None
    return cuda if all(cuda.has(kernel, where) for kernel in kernels) else None


def cuda_moments_(
    p: Any, g: Any, m: Any, v: Any, found_inf: Any, factor: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any,
    step: Any, multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
    numbers = (beta1, beta2, eps, weight_decay, step)
    if not p:
        return plain_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    pieces = items_of(
        (p, g, m, v), (), lambda *own: pack_floats(scalars((0.0, *own), multiplier, bias_correction)), numbers
    )
    where, gradient = p[0].device, CODES.get(g[0].dtype, FP32)
    kernel = cuda_runtime.lamb("zt_lamb_moments", gradient, NONE)
    add = cuda_runtime.lamb("zt_lamb_squares", FP32, NONE)
    cuda = _ready(pieces, (kernel, add), (found_inf, factor), where)
    if cuda is None:
        return plain_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    table = table_of(pieces)
    check_pieces(table.content[: table.groups], (FP32, gradient, FP32, FP32, NONE), "rrwwr")
    held = arguments.upload(table.content, where)
    squares = arguments.doubles(2, len(pieces), where=where, zero=True)
    sums = arguments.doubles(table.tiles, 2, where=where)
    base = held.data_ptr()
    flags = (pointer(found_inf), pointer(factor), 0)
    packed = _LAUNCH.pack(
        base, base + table.groups, *flags, sums.data_ptr(), squares.data_ptr(), table.count, table.tiles
    )
    cuda.fill(kernel, where, table.tiles, packed)
    cuda.fill(add, where, table.count, packed)
    return squares


def cuda_apply_(
    p: Any, m: Any, v: Any, out: Any, found_inf: Any, ratio: Tensor, lr: Any, beta1: Any, beta2: Any, eps: Any,
    weight_decay: Any, step: Any, bias_correction: bool,
) -> None:  # fmt: skip
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    if not p:
        return
    low: Sequence[Tensor | None] = out or [None] * len(p)
    plain.same_sizes(p, m, v, *([out] if out else []))
    plain.same_lengths(p, *numbers)
    rows: Any = zip(p, [None] * len(p), m, v, low, zip(*numbers, strict=True), strict=True)
    pieces = [LaunchItem(x, h, y, z, o, pack_floats(scalars(own, 1.0, bias_correction))) for x, h, y, z, o, own in rows]
    where, copied = p[0].device, CODES.get(out[0].dtype, FP32) if out else NONE
    kernel = cuda_runtime.lamb("zt_lamb_apply", FP32, copied)
    ready = (
        ratio.dtype == torch.float32 and ratio.is_contiguous() and ratio.shape == (len(p),) and ratio.device == where
    )
    cuda = _ready(pieces, (kernel,), (found_inf,), where) if ready else None
    if cuda is None:
        plain_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    table = table_of(pieces)
    check_pieces(table.content[: table.groups], (FP32, NONE, FP32, FP32, copied), "wrrrw")
    held = arguments.upload(table.content, where)
    base = held.data_ptr()
    flags = (pointer(found_inf), 0, ratio.data_ptr())
    packed = _LAUNCH.pack(base, base + table.groups, *flags, 0, 0, table.count, table.tiles)
    cuda.fill(kernel, where, table.tiles, packed)
