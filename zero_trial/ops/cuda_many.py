"""An optimizer step of many CUDA tensors: one launch per pair of the gradients' and the copies' dtypes, with a table in device memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zero_trial.ops import cuda_backend, cuda_kernels, cuda_scalars, cuda_tables, many, overlap, plain
from zero_trial.ops.cuda_arguments import (
    by_kind,
    code,
    no_graph,
    numbered,
    one_float,
    padded,
    pick,
    pieces_of,
    pointer,
)
from zero_trial.ops.cuda_kernels import FP32, Kernel
from zero_trial.ops.cuda_one import arguments_of
from zero_trial.ops.cuda_runtime import Cuda
from zero_trial.ops.cuda_tables import Piece, table_of, tiles_of

_ARGUMENTS, _NO_PIECE = struct.Struct("4P2q"), bytes(64)  # ZtUpdate of csrc/cuda/update.cu; the op follows


def _update(op: str, pieces: Sequence[Piece], found_inf: Tensor | None, factor: Tensor | None) -> list[int]:
    """Steps all pieces that can be; returns the numbers of the others."""
    left = [index for index, piece in enumerate(pieces) if piece.p.numel()]
    cuda = cuda_backend.cuda_backend().cuda
    if cuda is None or not left:
        return left
    for (gradient, out, where), mine in by_kind(pieces, lambda q: (code(q.g), code(q.out), q.p.device)).items():
        kernel = cuda_kernels.update(op, gradient, out)
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
    cuda: Cuda, kernel: Kernel, pieces: Sequence[Piece], stored: tuple[int, int], flags: tuple[int, int]
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
    head = _ARGUMENTS.pack(base, base + table.groups, *flags, table.count, table.tiles)
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
    scalars = partial(cuda_scalars.adam, multiplier=multiplier, decoupled=decoupled)
    left = _update("ZtAdam", pieces_of((p, g, m, v), out, scalars, numbers), found_inf, factor)
    if left:
        p, g, m, v, out, *rest = pick(left, p, g, m, v, out, *numbers)
        _in_turn(many.adam_many_, plain.adam_, p, g, m, v, out, found_inf, factor, *rest, multiplier, decoupled)


def lion_many_(
    p: Any, g: Any, m: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any, weight_decay: Any,
    multiplier: float,
) -> None:  # fmt: skip
    """Lion of each."""
    numbers = (lr, beta1, beta2, weight_decay)
    pieces = pieces_of((p, g, m), out, partial(cuda_scalars.lion, multiplier=multiplier), numbers)
    left = _update("ZtLion", pieces, found_inf, factor)
    if left:
        p, g, m, out, *rest = pick(left, p, g, m, out, *numbers)
        _in_turn(many.lion_many_, plain.lion_, p, g, m, out, found_inf, factor, *rest, multiplier)


def adagrad_many_(
    p: Any, g: Any, s: Any, out: Any, found_inf: Any, factor: Any, lr: Any, eps: Any, weight_decay: Any, multiplier: float
) -> None:  # fmt: skip
    """Adagrad of each."""
    numbers = (lr, eps, weight_decay)
    pieces = pieces_of((p, g, s), out, partial(cuda_scalars.adagrad, multiplier=multiplier), numbers)
    left = _update("ZtAdagrad", pieces, found_inf, factor)
    if left:
        p, g, s, out, *rest = pick(left, p, g, s, out, *numbers)
        _in_turn(many.adagrad_many_, plain.adagrad_, p, g, s, out, found_inf, factor, *rest, multiplier)


def sgd_many_(
    p: Any, g: Any, b: Any, out: Any, found_inf: Any, factor: Any, lr: Any, momentum: Any, dampening: Any,
    weight_decay: Any, first: Any, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum of each."""
    numbers = (lr, momentum, dampening, weight_decay, first)
    pieces = pieces_of((p, g, b), out, partial(cuda_scalars.sgd, nesterov=nesterov, multiplier=multiplier), numbers)
    left = _update("ZtSgd", pieces, found_inf, factor)
    if left:
        p, g, b, out, *rest = pick(left, p, g, b, out, *numbers)
        _in_turn(many.sgd_many_, plain.sgd_, p, g, b, out, found_inf, factor, *rest, nesterov, multiplier)
