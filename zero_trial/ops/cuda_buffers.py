"""Sums of squares, the scalars of a step, and copies between flat buffers on CUDA; plain torch where no kernel takes the tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_trial.ops import cuda_backend, cuda_kernels, cuda_scalars, cuda_tables, many, overlap, plain
from zero_trial.ops.cuda_arguments import CODES, code, flat, one_float, pick, pointer
from zero_trial.ops.cuda_kernels import FP32
from zero_trial.ops.cuda_tables import Piece, table_of

ELEMENTS_PER_CHUNK, SUMS_PER_CHUNK = 2048, 1024  # of zt_sums.h
_SUM, _COPY, _CONTROL = struct.Struct("2Pq"), struct.Struct("P2q"), struct.Struct("3P")


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares in float64, a scalar tensor; not finite if and only if an element is not. Reads ``x`` once."""
    cuda, where = cuda_backend.cuda_backend().cuda, x.device
    kernel, level = cuda_kernels.square_sum(CODES.get(x.dtype, FP32)), cuda_kernels.sums()
    if cuda is None or x.dtype not in CODES or not x.is_contiguous() or not x.numel():
        return plain.square_sum(x)
    if not (cuda.has(kernel, where) and cuda.has(level, where)):
        return plain.square_sum(x)
    count = -(-x.numel() // ELEMENTS_PER_CHUNK)
    sums = cuda_tables.doubles(count, where=where)
    together = 32 if x.dtype == torch.float32 else 64  # chunks per block
    cuda.fill(kernel, where, -(-count // together), _SUM.pack(x.data_ptr(), sums.data_ptr(), x.numel()))
    while count > 1:
        below, count = count, -(-count // SUMS_PER_CHUNK)
        above = cuda_tables.doubles(count, where=where)
        cuda.launch(level, where, -(-count // 8), _SUM.pack(sums.data_ptr(), above.data_ptr(), below))
        sums = above
    return sums.view(())


def step_control_(square_sum: Tensor, loss_scale: Tensor | None, control: Tensor, unscale: float, clip: float) -> None:
    """control = (norm, factor, found_inf), by one thread on the device."""
    cuda, where, kernel = cuda_backend.cuda_backend().cuda, control.device, cuda_kernels.step_control()
    sound = control.shape == (3,) and control.dtype == torch.float32 and control.is_contiguous()
    double = square_sum.dtype == torch.float64 and square_sum.numel() == 1 and square_sum.device == where
    if cuda is None or not (sound and double and one_float(loss_scale, where)) or not cuda.has(kernel, where):
        many.step_control_(square_sum, loss_scale, control, unscale, clip)
        return
    pointers = _CONTROL.pack(square_sum.data_ptr(), pointer(loss_scale), control.data_ptr())
    cuda.launch(kernel, where, 1, pointers + cuda_scalars.control(unscale, clip))


def copy_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source into its target, cast."""
    _copy(into, source, add=False)


def add_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source added to its target; the sum is rounded once."""
    _copy(into, source, add=True)


def _copy(into: Sequence[Tensor], source: Sequence[Tensor], *, add: bool) -> None:
    many.same_sizes(into, source)
    cuda = cuda_backend.cuda_backend().cuda
    left = set(range(len(into)))
    kinds: dict[tuple[int, int, torch.device], list[int]] = {}
    for index, (target, values) in enumerate(zip(into, source, strict=True)):
        if flat(target, target.device) and flat(values, target.device) and target.numel():
            kinds.setdefault((code(values), code(target), target.device), []).append(index)
    for (stored, target_stored, where), mine in kinds.items():
        kernel = cuda_kernels.copy(stored, target_stored, add)
        if cuda is None or where.type != cuda.kind or cuda.capturing(where) or not cuda.has(kernel, where):
            continue
        table = table_of([Piece(into[index], source[index]) for index in mine])
        overlap.check_copies(table.content[: table.groups], target_stored, stored)
        held = cuda_tables.upload(table.content, where)
        arguments = _COPY.pack(held.data_ptr(), table.count, table.tiles)
        cuda.fill(kernel, where, table.tiles, arguments)
        left -= set(mine)
    rest = pick(sorted(left), into, source)
    (many.add_many_ if add else many.copy_many_)(*rest)
