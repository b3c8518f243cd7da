"""An optimizer step of one CUDA tensor: one launch that needs no table, or plain torch where no kernel takes the tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_trial.ops import arguments, cuda_runtime, plain
from zero_trial.ops import arguments as cuda_scalars
from zero_trial.ops import arguments as cuda_tables
from zero_trial.ops import arguments as overlap
from zero_trial.ops.arguments import (
    CODES,
    LaunchItem,
    by_kind,
    code,
    flat,
    no_graph,
    numbered,
    one_float,
    padded,
    pick,
    pieces_of,
    pointer,
    table_of,
    takes,
    tiles_of,
)
from zero_trial.ops.cuda_runtime import FP32, NONE, CudaRuntime, Kernel

__all__ = [
    "adagrad_",
    "adagrad_many_",
    "adam_",
    "adam_many_",
    "add_many_",
    "copy_many_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "lion_many_",
    "sgd_",
    "sgd_many_",
    "square_sum",
    "step_control_",
]

_ARGUMENTS = struct.Struct("4P2q5P3q")  # ZtUpdate of csrc/cuda/update.cu, up to the op


def arguments_of(
    flags: tuple[int, int], pointers: tuple[int, int, int, int, int], n: int, tiles: int, scalars: bytes
) -> bytes:
    """A launch that holds its one piece. ``flags``: found_inf, factor; ``pointers``: p, g, two states, out; null for none."""
    return padded(_ARGUMENTS.pack(0, 0, *flags, 1, tiles, *pointers, n, 0, 0) + scalars)


def _step(
    op: str, p: Tensor, g: Tensor, a: Tensor, b: Tensor | None, out: Tensor | None, found: Tensor | None, scalars: bytes
) -> bool:
    """Steps one tensor; False where plain torch must. Written for few microseconds."""
    if p.requires_grad:
        no_graph(p)
    n, where, cuda = p.numel(), p.device, cuda_runtime.cuda_backend().cuda
    takes = p.dtype is torch.float32 and p.is_contiguous()
    for x, may_be_low in ((g, True), (a, False), (b, False), (out, True)):
        if x is not None:
            if x.numel() != n:
                plain.same_sizes([p], [x])
            sound = x.dtype in CODES if may_be_low else x.dtype is torch.float32
            takes = takes and sound and x.device == where and x.is_contiguous()
    if not n:
        return True
    if cuda is None or not takes or not (found is None or one_float(found, where)):
        return False
    stored, copied = CODES[g.dtype], NONE if out is None else CODES[out.dtype]
    kernel = cuda_runtime.update(op, stored, copied)
    if not cuda.has(kernel, where):
        return False
    pointers = (p.data_ptr(), g.data_ptr(), a.data_ptr(), pointer(b), pointer(out))
    arguments.check_step(pointers, n, stored, copied)
    tiles, flag = tiles_of(n), 0 if found is None else found.data_ptr()
    cuda.fill(kernel, where, tiles, arguments_of((flag, 0), pointers, n, tiles, scalars))
    return True


def adam_(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: float, multiplier: float, decoupled: bool,
) -> None:  # fmt: skip
    """Adam (``decoupled`` False) or AdamW, step number ``step`` from 1."""
    numbered(step)
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    if not _step("ZtAdam", p, g, m, v, out, found_inf, arguments.adam(*numbers, multiplier, decoupled)):
        plain.adam_(p, g, m, v, out, found_inf, *numbers, multiplier, decoupled)


def lion_(
    p: Tensor, g: Tensor, m: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float, beta2: float,
    weight_decay: float, multiplier: float,
) -> None:  # fmt: skip
    """Lion."""
    numbers = (lr, beta1, beta2, weight_decay, multiplier)
    if not _step("ZtLion", p, g, m, None, out, found_inf, arguments.lion(*numbers)):
        plain.lion_(p, g, m, out, found_inf, *numbers)


def adagrad_(
    p: Tensor, g: Tensor, s: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, eps: float,
    weight_decay: float, multiplier: float,
) -> None:  # fmt: skip
    """Adagrad; ``lr`` with its decay already in it."""
    numbers = (lr, eps, weight_decay, multiplier)
    if not _step("ZtAdagrad", p, g, s, None, out, found_inf, arguments.adagrad(*numbers)):
        plain.adagrad_(p, g, s, out, found_inf, *numbers)


def sgd_(
    p: Tensor, g: Tensor, b: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, momentum: float,
    dampening: float, weight_decay: float, first: bool, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum; ``first``: the buffer becomes the gradient, undamped."""
    numbers = (lr, momentum, dampening, weight_decay, first, nesterov, multiplier)
    if not _step("ZtSgd", p, g, b, None, out, found_inf, arguments.sgd(*numbers)):
        plain.sgd_(p, g, b, out, found_inf, *numbers)


# An optimizer step of many CUDA tensors: one launch per pair of the gradients' and the copies' dtypes, with a table in device memory.


_ARGUMENTS_CUDA_MANY, _NO_PIECE = struct.Struct("4P2q"), bytes(64)  # ZtUpdate of csrc/cuda/update.cu; the op follows


def _update(op: str, pieces: Sequence[LaunchItem], found_inf: Tensor | None, factor: Tensor | None) -> list[int]:
    """Steps all pieces that can be; returns the numbers of the others."""
    left = [index for index, piece in enumerate(pieces) if piece.p.numel()]
    cuda = cuda_runtime.cuda_backend().cuda
    if cuda is None or not left:
        return left
    for (gradient, out, where), mine in by_kind(pieces, lambda q: (code(q.g), code(q.out), q.p.device)).items():
        kernel = cuda_runtime.update(op, gradient, out)
        reachable = where.type == cuda.kind and one_float(found_inf, where) and one_float(factor, where)
        if reachable and cuda.has(kernel, where):
            chosen = [pieces[index] for index in mine]
            for piece in chosen:
                no_graph(piece.p)
            _launch(cuda, kernel, chosen, (gradient, out), (pointer(found_inf), pointer(factor)))
            done = set(mine)
            left = [index for index in left if index not in done]
    return left


def _launch(
    cuda: CudaRuntime, kernel: Kernel, pieces: Sequence[LaunchItem], stored: tuple[int, int], flags: tuple[int, int]
) -> None:
    where, (gradient, out) = pieces[0].p.device, stored
    if len(pieces) == 1 or cuda.capturing(where):  # no table to copy, which a graph could not hold
        for one in pieces:
            pointers = (one.p.data_ptr(), pointer(one.g), pointer(one.a), pointer(one.b), pointer(one.out))
            n, tiles = one.p.numel(), tiles_of(one.p.numel())
            overlap.check_step(pointers, n, gradient, out)
            cuda.fill(kernel, where, tiles, arguments_of(flags, pointers, n, tiles, one.scalars))
        return
    table = table_of(pieces)
    overlap.check_pieces(table.content[: table.groups], (FP32, gradient, FP32, FP32, out), "wrwww")
    held = cuda_tables.upload(table.content, where)
    base = held.data_ptr()
    head = _ARGUMENTS_CUDA_MANY.pack(base, base + table.groups, *flags, table.count, table.tiles)
    arguments = head + _NO_PIECE + bytes(len(pieces[0].scalars))
    cuda.fill(kernel, where, table.tiles, padded(arguments))


def _in_turn(op: Callable[..., None], *arguments: Any) -> None:
    op(*arguments)


def adam_many_(
    p: Any, g: Any, m: Any, v: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any, eps: Any,
    weight_decay: Any, step: Any, multiplier: float, decoupled: bool,
) -> None:  # fmt: skip
    """Adam or AdamW of each."""
    for number in step:
        numbered(number)
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    scalars = partial(arguments.adam, multiplier=multiplier, decoupled=decoupled)
    left = _update("ZtAdam", pieces_of((p, g, m, v), out, scalars, numbers), found_inf, factor)
    if left:
        p, g, m, v, out, *rest = pick(left, p, g, m, v, out, *numbers)
        _in_turn(plain.adam_many_, plain.adam_, p, g, m, v, out, found_inf, factor, *rest, multiplier, decoupled)


def lion_many_(
    p: Any, g: Any, m: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any, weight_decay: Any,
    multiplier: float,
) -> None:  # fmt: skip
    """Lion of each."""
    numbers = (lr, beta1, beta2, weight_decay)
    pieces = pieces_of((p, g, m), out, partial(arguments.lion, multiplier=multiplier), numbers)
    left = _update("ZtLion", pieces, found_inf, factor)
    if left:
        p, g, m, out, *rest = pick(left, p, g, m, out, *numbers)
        _in_turn(plain.lion_many_, plain.lion_, p, g, m, out, found_inf, factor, *rest, multiplier)


def adagrad_many_(
    p: Any, g: Any, s: Any, out: Any, found_inf: Any, factor: Any, lr: Any, eps: Any, weight_decay: Any, multiplier: float
) -> None:  # fmt: skip
    """Adagrad of each."""
    numbers = (lr, eps, weight_decay)
    pieces = pieces_of((p, g, s), out, partial(arguments.adagrad, multiplier=multiplier), numbers)
    left = _update("ZtAdagrad", pieces, found_inf, factor)
    if left:
        p, g, s, out, *rest = pick(left, p, g, s, out, *numbers)
        _in_turn(plain.adagrad_many_, plain.adagrad_, p, g, s, out, found_inf, factor, *rest, multiplier)


def sgd_many_(
    p: Any, g: Any, b: Any, out: Any, found_inf: Any, factor: Any, lr: Any, momentum: Any, dampening: Any,
    weight_decay: Any, first: Any, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum of each."""
    numbers = (lr, momentum, dampening, weight_decay, first)
    pieces = pieces_of((p, g, b), out, partial(arguments.sgd, nesterov=nesterov, multiplier=multiplier), numbers)
    left = _update("ZtSgd", pieces, found_inf, factor)
    if left:
        p, g, b, out, *rest = pick(left, p, g, b, out, *numbers)
        _in_turn(plain.sgd_many_, plain.sgd_, p, g, b, out, found_inf, factor, *rest, nesterov, multiplier)


# LAMB over many CUDA tensors: two launches for the moments and their sums, one for the step; plain torch where kernels do not take them all.


_ARGUMENTS_CUDA_LAMB = struct.Struct("7P2q")  # ZtLambLaunch of csrc/cuda/lamb.cu


def _ready(
    pieces: Sequence[LaunchItem], kernels: Sequence[Kernel], flags: Sequence[Tensor | None], where: torch.device
) -> CudaRuntime | None:
    """Who launches them all at once, if anybody can."""
    cuda = cuda_runtime.cuda_backend().cuda
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
        return plain.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    scalars = partial(cuda_scalars.lamb, 0.0, multiplier=multiplier, corrected=bias_correction)
    pieces = pieces_of((p, g, m, v), (), scalars, numbers)
    where, gradient = p[0].device, CODES.get(g[0].dtype, FP32)
    kernel = cuda_runtime.lamb("zt_lamb_moments", gradient, NONE)
    add = cuda_runtime.lamb("zt_lamb_squares", FP32, NONE)
    cuda = _ready(pieces, (kernel, add), (found_inf, factor), where)
    if cuda is None:
        return plain.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    table = table_of(pieces)
    overlap.check_pieces(table.content[: table.groups], (FP32, gradient, FP32, FP32, NONE), "rrwwr")
    held = cuda_tables.upload(table.content, where)
    squares = cuda_tables.doubles(2, len(pieces), where=where, zero=True)
    sums = cuda_tables.doubles(table.tiles, 2, where=where)
    base = held.data_ptr()
    flags = (pointer(found_inf), pointer(factor), 0)
    arguments = _ARGUMENTS_CUDA_LAMB.pack(
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
    plain.same_sizes(p, m, v, *([out] if out else []))
    plain.same_lengths(p, *numbers)
    rows: Any = zip(p, [None] * len(p), m, v, low, zip(*numbers, strict=True), strict=True)
    pieces = [LaunchItem(x, h, y, z, o, scalars(*own)) for x, h, y, z, o, own in rows]
    where, copied = p[0].device, CODES.get(out[0].dtype, FP32) if out else NONE
    kernel = cuda_runtime.lamb("zt_lamb_apply", FP32, copied)
    ready = (
        ratio.dtype == torch.float32 and ratio.is_contiguous() and ratio.shape == (len(p),) and ratio.device == where
    )
    cuda = _ready(pieces, (kernel,), (found_inf,), where) if ready else None
    if cuda is None:
        plain.lamb_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    table = table_of(pieces)
    overlap.check_pieces(table.content[: table.groups], (FP32, NONE, FP32, FP32, copied), "wrrrw")
    held = cuda_tables.upload(table.content, where)
    base = held.data_ptr()
    flags = (pointer(found_inf), 0, ratio.data_ptr())
    arguments = _ARGUMENTS_CUDA_LAMB.pack(base, base + table.groups, *flags, 0, 0, table.count, table.tiles)
    cuda.fill(kernel, where, table.tiles, arguments)


# Sums of squares, the scalars of a step, and copies between flat buffers on CUDA; plain torch where no kernel takes the tensors.


ELEMENTS_PER_CHUNK, SUMS_PER_CHUNK = 2048, 1024  # of zt_sums.h


_SUM, _COPY, _CONTROL = struct.Struct("2Pq"), struct.Struct("P2q"), struct.Struct("3P")


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares in float64, a scalar tensor; not finite if and only if an element is not. Reads ``x`` once."""
    cuda, where = cuda_runtime.cuda_backend().cuda, x.device
    kernel, level = cuda_runtime.square_sum(CODES.get(x.dtype, FP32)), cuda_runtime.sums()
    if cuda is None or x.dtype not in CODES or not x.is_contiguous() or not x.numel():
        return plain.square_sum(x)
    if not (cuda.has(kernel, where) and cuda.has(level, where)):
        return plain.square_sum(x)
    count = -(-x.numel() // ELEMENTS_PER_CHUNK)
    sums = arguments.doubles(count, where=where)
    together = 32 if x.dtype == torch.float32 else 64  # chunks per block
    cuda.fill(kernel, where, -(-count // together), _SUM.pack(x.data_ptr(), sums.data_ptr(), x.numel()))
    while count > 1:
        below, count = count, -(-count // SUMS_PER_CHUNK)
        above = arguments.doubles(count, where=where)
        cuda.launch(level, where, -(-count // 8), _SUM.pack(sums.data_ptr(), above.data_ptr(), below))
        sums = above
    return sums.view(())


def step_control_(square_sum: Tensor, loss_scale: Tensor | None, control: Tensor, unscale: float, clip: float) -> None:
    """control = (norm, factor, found_inf), by one thread on the device."""
    cuda, where, kernel = cuda_runtime.cuda_backend().cuda, control.device, cuda_runtime.step_control()
    sound = control.shape == (3,) and control.dtype == torch.float32 and control.is_contiguous()
    double = square_sum.dtype == torch.float64 and square_sum.numel() == 1 and square_sum.device == where
    if cuda is None or not (sound and double and one_float(loss_scale, where)) or not cuda.has(kernel, where):
        plain.step_control_(square_sum, loss_scale, control, unscale, clip)
        return
    pointers = _CONTROL.pack(square_sum.data_ptr(), pointer(loss_scale), control.data_ptr())
    cuda.launch(kernel, where, 1, pointers + arguments.control(unscale, clip))


def copy_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source into its target, cast."""
    _copy(into, source, add=False)


def add_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source added to its target; the sum is rounded once."""
    _copy(into, source, add=True)


def _copy(into: Sequence[Tensor], source: Sequence[Tensor], *, add: bool) -> None:
    plain.same_sizes(into, source)
    cuda = cuda_runtime.cuda_backend().cuda
    left = set(range(len(into)))
    kinds: dict[tuple[int, int, torch.device], list[int]] = {}
    for index, (target, values) in enumerate(zip(into, source, strict=True)):
        if flat(target, target.device) and flat(values, target.device) and target.numel():
            kinds.setdefault((code(values), code(target), target.device), []).append(index)
    for (stored, target_stored, where), mine in kinds.items():
        kernel = cuda_runtime.copy(stored, target_stored, add)
        if cuda is None or where.type != cuda.kind or cuda.capturing(where) or not cuda.has(kernel, where):
            continue
        table = table_of([LaunchItem(into[index], source[index]) for index in mine])
        overlap.check_copies(table.content[: table.groups], target_stored, stored)
        held = cuda_tables.upload(table.content, where)
        arguments = _COPY.pack(held.data_ptr(), table.count, table.tiles)
        cuda.fill(kernel, where, table.tiles, arguments)
        left -= set(mine)
    rest = pick(sorted(left), into, source)
    (plain.add_many_ if add else plain.copy_many_)(*rest)
