"""LAMB over many CUDA tensors: two launches for the moments and their sums, one for the step; plain torch where kernels do not take them all."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_trial.ops import cuda_backend, cuda_kernels, cuda_scalars, cuda_tables, many, overlap
from zero_trial.ops.cuda_arguments import CODES, code, one_float, pieces_of, pointer, takes
from zero_trial.ops.cuda_kernels import FP32, NONE, Kernel
from zero_trial.ops.cuda_runtime import Cuda
from zero_trial.ops.cuda_tables import Piece, table_of

_ARGUMENTS = struct.Struct("7P2q")  # ZtLambLaunch of csrc/cuda/lamb.cu


def _ready(
    pieces: Sequence[Piece], kernels: Sequence[Kernel], flags: Sequence[Tensor | None], where: torch.device
) -> Cuda | None:
    """Who launches them all at once, if anybody can."""
    cuda = cuda_backend.cuda_backend().cuda
    kinds = {(code(q.g), code(q.out), q.p.device) if takes(q) and q.p.numel() else None for q in pieces}
    alike = len(kinds) == 1 and None not in kinds and all(one_float(flag, where) for flag in flags)
    if cuda is None or where.type != cuda.kind or not alike or cuda.capturing(where):
        return None
    return cuda if all(cuda.has(kernel, where) for kernel in kernels) else None


def lamb_moments_(
    p: Any, g: Any, m: Any, v: Any, found_inf: Any, factor: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any,
    step: Any, multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
    numbers = (beta1, beta2, eps, weight_decay, step)
    if not p:
        return many.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    scalars = partial(cuda_scalars.lamb, 0.0, multiplier=multiplier, corrected=bias_correction)
    pieces = pieces_of((p, g, m, v), (), scalars, numbers)
    where, gradient = p[0].device, CODES.get(g[0].dtype, FP32)
    kernel = cuda_kernels.lamb("zt_lamb_moments", gradient, NONE)
    add = cuda_kernels.lamb("zt_lamb_squares", FP32, NONE)
    cuda = _ready(pieces, (kernel, add), (found_inf, factor), where)
    if cuda is None:
        return many.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    table = table_of(pieces)
    overlap.check_pieces(table.content[: table.groups], (FP32, gradient, FP32, FP32, NONE), "rrwwr")
    held = cuda_tables.upload(table.content, where)
    squares = cuda_tables.doubles(2, len(pieces), where=where, zero=True)
    sums = cuda_tables.doubles(table.tiles, 2, where=where)
    base = held.data_ptr()
    flags = (pointer(found_inf), pointer(factor), 0)
    arguments = _ARGUMENTS.pack(
        base, base + table.groups, *flags, sums.data_ptr(), squares.data_ptr(), table.count, table.tiles
    )
    cuda.fill(kernel, where, table.tiles, arguments)
    cuda.fill(add, where, table.count, arguments)
    return squares


def lamb_apply_(
    p: Any, m: Any, v: Any, out: Any, found_inf: Any, ratio: Tensor, lr: Any, beta1: Any, beta2: Any, eps: Any,
    weight_decay: Any, step: Any, bias_correction: bool,
) -> None:  # fmt: skip
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    if not p:
        return
    scalars = partial(cuda_scalars.lamb, multiplier=1.0, corrected=bias_correction)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    many.same_sizes(p, m, v, *([out] if out else []))
    many.same_lengths(p, *numbers)
    rows: Any = zip(p, [None] * len(p), m, v, low, zip(*numbers, strict=True), strict=True)
    pieces = [Piece(x, h, y, z, o, scalars(*own)) for x, h, y, z, o, own in rows]
    where, copied = p[0].device, CODES.get(out[0].dtype, FP32) if out else NONE
    kernel = cuda_kernels.lamb("zt_lamb_apply", FP32, copied)
    ready = (
        ratio.dtype == torch.float32 and ratio.is_contiguous() and ratio.shape == (len(p),) and ratio.device == where
    )
    cuda = _ready(pieces, (kernel,), (found_inf,), where) if ready else None
    if cuda is None:
        many.lamb_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    table = table_of(pieces)
    overlap.check_pieces(table.content[: table.groups], (FP32, NONE, FP32, FP32, copied), "wrrrw")
    held = cuda_tables.upload(table.content, where)
    base = held.data_ptr()
    flags = (pointer(found_inf), 0, ratio.data_ptr())
    arguments = _ARGUMENTS.pack(base, base + table.groups, *flags, 0, 0, table.count, table.tiles)
    cuda.fill(kernel, where, table.tiles, arguments)
