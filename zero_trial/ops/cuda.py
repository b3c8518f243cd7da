"""The ops on CUDA tensors: one launch of a kernel of csrc/cuda each, or plain torch where no kernel takes the tensors.

Everything a step depends on is read from device memory by the kernel, so nothing here waits for the device: ``found_inf``, ``factor``
and, in a launch over many tensors, the table of pointers and scalars, which is copied there in the order of the stream.

    launches    adam_, lion_, adagrad_, sgd_ 1 · the same over many tensors 1 (per pair of gradient's and copy's dtype; one alone needs no table) ·
                square_sum 1 + 1 per factor 1024 of chunks · LAMB 2 and 1

A CUDA graph cannot hold a table: while one is captured each tensor is a launch of its own, and casts and LAMB are plain torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_trial.ops import cuda_kernels, cuda_scalars, many, plain
from zero_trial.ops.cuda_backend import Cuda, cuda_backend
from zero_trial.ops.cuda_kernels import FP32, NONE, Kernel
from zero_trial.ops.cuda_tables import Piece, table_of, tiles_of, upload

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ELEMENTS_PER_CHUNK, SUMS_PER_CHUNK = 2048, 1024  # of zt_sums.h
_UPDATE, _COPY, _SUM = struct.Struct("4P2q"), struct.Struct("P2q"), struct.Struct("2Pq")
_LAMB, _CONTROL = struct.Struct("7P2q"), struct.Struct("3P")
_ONE, _NO_PIECE = struct.Struct("4P2q5P3q"), bytes(64)

_T = TypeVar("_T")


def _piece(scalars: bytes, *tensors: Any) -> Piece:
    p, g, a, b, out = tensors
    return Piece(p, g, a, b, out, scalars)


# --- what is taken ----------------------------------------------------------------------------------------------------


def _one_float(x: Tensor | None, where: torch.device) -> bool:
    return x is None or (x.dtype == torch.float32 and x.numel() == 1 and x.device == where)


def _flat(x: Tensor, where: torch.device) -> bool:
    return x.is_contiguous() and x.device == where and x.dtype in CODES


def _takes(piece: Piece) -> bool:
    where = piece.p.device
    wide = [x for x in (piece.p, piece.a, piece.b) if x is not None]
    return all(_flat(x, where) and x.dtype == torch.float32 for x in wide) and all(
        _flat(x, where) for x in (piece.g, piece.out) if x is not None
    )


def _code(x: Tensor | None) -> int:
    return NONE if x is None else CODES[x.dtype]


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _by_kind(pieces: Sequence[Piece], kind: Callable[[Piece], _T]) -> dict[_T, list[int]]:
    """Numbers of the pieces that kernels can take and that have elements, by ``kind``."""
    found: dict[_T, list[int]] = {}
    for index, piece in enumerate(pieces):
        if _takes(piece) and piece.p.numel():
            found.setdefault(kind(piece), []).append(index)
    return found


# --- optimizer steps --------------------------------------------------------------------------------------------------


def _one(
    op: str, p: Tensor, g: Tensor, a: Tensor, b: Tensor | None, out: Tensor | None, found: Tensor | None, scalars: bytes
) -> bool:
    """Steps one tensor, described in the launch's own arguments; False where plain torch must. Written for few microseconds."""
    n, where, cuda = p.numel(), p.device, cuda_backend().cuda
    takes = p.dtype is torch.float32 and p.is_contiguous()
    for x, may_be_low in ((g, True), (a, False), (b, False), (out, True)):
        if x is not None:
            if x.numel() != n:
                many.same_sizes([p], [x])
            sound = x.dtype in CODES if may_be_low else x.dtype is torch.float32
            takes = takes and sound and x.device == where and x.is_contiguous()
    if not n:
        return True
    if cuda is None or not takes or not (found is None or _one_float(found, where)):
        return False
    kernel = cuda_kernels.update(op, CODES[g.dtype], NONE if out is None else CODES[out.dtype])
    if not cuda.has(kernel, where):
        return False
    tiles = tiles_of(n)
    flags = (0 if found is None else found.data_ptr(), 0)
    pointers = (p.data_ptr(), g.data_ptr(), a.data_ptr(), _pointer(b), _pointer(out))
    arguments = _ONE.pack(0, 0, *flags, 1, tiles, *pointers, n, 0, 0) + scalars
    cuda.launch(kernel, where, _blocks(cuda, kernel, where, tiles), _padded(arguments))
    return True


def _update(op: str, pieces: Sequence[Piece], found_inf: Tensor | None, factor: Tensor | None) -> list[int]:
    """Steps all pieces that can be; returns the numbers of the others."""
    for piece in pieces:
        many.same_sizes(*([x] for x in (piece.p, piece.g, piece.a, piece.b, piece.out) if x is not None))
    left = [index for index, piece in enumerate(pieces) if piece.p.numel()]
    if not left:
        return left
    cuda = cuda_backend().cuda
    if cuda is None:
        return left
    for (gradient, out, where), mine in _by_kind(pieces, lambda q: (_code(q.g), _code(q.out), q.p.device)).items():
        kernel = cuda_kernels.update(op, gradient, out)
        reachable = where.type == cuda.kind and _one_float(found_inf, where) and _one_float(factor, where)
        if reachable and cuda.has(kernel, where):
            _launch_update(cuda, kernel, [pieces[index] for index in mine], found_inf, factor)
            left = [index for index in left if index not in set(mine)]
    return left


def _launch_update(
    cuda: Cuda, kernel: Kernel, pieces: Sequence[Piece], found_inf: Tensor | None, factor: Tensor | None
) -> None:
    where, flags = pieces[0].p.device, (_pointer(found_inf), _pointer(factor))
    if len(pieces) == 1 or cuda.capturing():  # no table to make and to copy
        for one in pieces:
            tiles = tiles_of(one.p.numel())
            pointers = (one.p.data_ptr(), *(_pointer(x) for x in (one.g, one.a, one.b, one.out)))
            arguments = _ONE.pack(0, 0, *flags, 1, tiles, *pointers, one.p.numel(), 0, 0) + one.scalars
            cuda.launch(kernel, where, _blocks(cuda, kernel, where, tiles), _padded(arguments))
        return
    table = table_of(pieces)
    held = upload(table.content, where)
    base = held.data_ptr()
    head = _UPDATE.pack(base, base + table.groups, *flags, table.count, table.tiles)
    arguments = head + _NO_PIECE + bytes(len(pieces[0].scalars))
    cuda.launch(kernel, where, _blocks(cuda, kernel, where, table.tiles), _padded(arguments))


def _blocks(cuda: Cuda, kernel: Kernel, where: torch.device, tiles: int) -> int:
    """All that the device holds at once, and no more than there is work for."""
    return min(tiles, kernel.blocks * cuda.device(where).multiprocessors)


def _padded(arguments: bytes) -> bytes:
    """To the alignment of the struct, that of its pointers."""
    return arguments + bytes(-len(arguments) % 8)


def adam_(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: float, multiplier: float, decoupled: bool,
) -> None:  # fmt: skip
    """Adam (``decoupled`` False) or AdamW, step number ``step`` from 1."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    if not _one("ZtAdam", p, g, m, v, out, found_inf, cuda_scalars.adam(*numbers, multiplier, decoupled)):
        plain.adam_(p, g, m, v, out, found_inf, *numbers, multiplier, decoupled)


def lion_(
    p: Tensor, g: Tensor, m: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float, beta2: float,
    weight_decay: float, multiplier: float,
) -> None:  # fmt: skip
    """Lion."""
    numbers = (lr, beta1, beta2, weight_decay, multiplier)
    if not _one("ZtLion", p, g, m, None, out, found_inf, cuda_scalars.lion(*numbers)):
        plain.lion_(p, g, m, out, found_inf, *numbers)


def adagrad_(
    p: Tensor, g: Tensor, s: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, eps: float,
    weight_decay: float, multiplier: float,
) -> None:  # fmt: skip
    """Adagrad; ``lr`` with its decay already in it."""
    numbers = (lr, eps, weight_decay, multiplier)
    if not _one("ZtAdagrad", p, g, s, None, out, found_inf, cuda_scalars.adagrad(*numbers)):
        plain.adagrad_(p, g, s, out, found_inf, *numbers)


def sgd_(
    p: Tensor, g: Tensor, b: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, momentum: float,
    dampening: float, weight_decay: float, first: bool, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum; ``first``: the buffer becomes the gradient, undamped."""
    numbers = (lr, momentum, dampening, weight_decay, first, nesterov, multiplier)
    if not _one("ZtSgd", p, g, b, None, out, found_inf, cuda_scalars.sgd(*numbers)):
        plain.sgd_(p, g, b, out, found_inf, *numbers)


# --- the same over many tensors ---------------------------------------------------------------------------------------


def _pieces(
    tensors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
    scalars: Callable[..., bytes],
    numbers: Sequence[Sequence[Any]],
) -> list[Piece]:
    """p, g, one or two states, the copies, and each tensor's struct of scalars."""
    many.same_sizes(*tensors, *([out] if out else []))
    p, g, a, *second = tensors
    b: Sequence[Tensor | None] = second[0] if second else [None] * len(p)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    rows: Any = zip(p, g, a, b, low, zip(*numbers, strict=True), strict=True)
    return [_piece(scalars(*own), *row) for *row, own in rows]


def _in_turn(op: Callable[..., None], *arguments: Any) -> None:
    op(*arguments)


def _pick(indices: list[int], *lists: Sequence[Any]) -> Any:
    return [[each[index] for index in indices] if each else [] for each in lists]


def adam_many_(
    p: Any, g: Any, m: Any, v: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any, eps: Any,
    weight_decay: Any, step: Any, multiplier: float, decoupled: bool,
) -> None:  # fmt: skip
    """Adam or AdamW of each."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    scalars = partial(cuda_scalars.adam, multiplier=multiplier, decoupled=decoupled)
    left = _update("ZtAdam", _pieces((p, g, m, v), out, scalars, numbers), found_inf, factor)
    if left:
        p, g, m, v, out, *rest = _pick(left, p, g, m, v, out, *numbers)
        _in_turn(many.adam_many_, plain.adam_, p, g, m, v, out, found_inf, factor, *rest, multiplier, decoupled)


def lion_many_(
    p: Any, g: Any, m: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any, weight_decay: Any,
    multiplier: float,
) -> None:  # fmt: skip
    """Lion of each."""
    numbers = (lr, beta1, beta2, weight_decay)
    pieces = _pieces((p, g, m), out, partial(cuda_scalars.lion, multiplier=multiplier), numbers)
    left = _update("ZtLion", pieces, found_inf, factor)
    if left:
        p, g, m, out, *rest = _pick(left, p, g, m, out, *numbers)
        _in_turn(many.lion_many_, plain.lion_, p, g, m, out, found_inf, factor, *rest, multiplier)


def adagrad_many_(
    p: Any, g: Any, s: Any, out: Any, found_inf: Any, factor: Any, lr: Any, eps: Any, weight_decay: Any, multiplier: float
) -> None:  # fmt: skip
    """Adagrad of each."""
    numbers = (lr, eps, weight_decay)
    pieces = _pieces((p, g, s), out, partial(cuda_scalars.adagrad, multiplier=multiplier), numbers)
    left = _update("ZtAdagrad", pieces, found_inf, factor)
    if left:
        p, g, s, out, *rest = _pick(left, p, g, s, out, *numbers)
        _in_turn(many.adagrad_many_, plain.adagrad_, p, g, s, out, found_inf, factor, *rest, multiplier)


def sgd_many_(
    p: Any, g: Any, b: Any, out: Any, found_inf: Any, factor: Any, lr: Any, momentum: Any, dampening: Any,
    weight_decay: Any, first: Any, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum of each."""
    numbers = (lr, momentum, dampening, weight_decay, first)
    pieces = _pieces((p, g, b), out, partial(cuda_scalars.sgd, nesterov=nesterov, multiplier=multiplier), numbers)
    left = _update("ZtSgd", pieces, found_inf, factor)
    if left:
        p, g, b, out, *rest = _pick(left, p, g, b, out, *numbers)
        _in_turn(many.sgd_many_, plain.sgd_, p, g, b, out, found_inf, factor, *rest, nesterov, multiplier)


# --- LAMB -------------------------------------------------------------------------------------------------------------


def _lamb_ready(
    pieces: Sequence[Piece], kernels: Sequence[Kernel], flags: Sequence[Tensor | None], where: torch.device
) -> Cuda | None:
    cuda = cuda_backend().cuda
    kinds = {(_code(q.g), _code(q.out), q.p.device) if _takes(q) and q.p.numel() else None for q in pieces}
    alike = len(kinds) == 1 and None not in kinds and all(_one_float(flag, where) for flag in flags)
    if cuda is None or where.type != cuda.kind or not alike or cuda.capturing():
        return None
    return cuda if all(cuda.has(kernel, where) for kernel in kernels) else None


def lamb_moments_(
    p: Any, g: Any, m: Any, v: Any, found_inf: Any, factor: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any,
    step: Any, multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
    numbers = (beta1, beta2, eps, weight_decay, step)
    scalars = partial(cuda_scalars.lamb, 0.0, multiplier=multiplier, corrected=bias_correction)
    pieces = _pieces((p, g, m, v), (), scalars, numbers)
    where = p[0].device
    kernel = cuda_kernels.lamb("zt_lamb_moments", CODES.get(g[0].dtype, FP32), NONE)
    add = cuda_kernels.lamb("zt_lamb_squares", FP32, NONE)
    cuda = _lamb_ready(pieces, (kernel, add), (found_inf, factor), where)
    if cuda is None:
        return many.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    table = table_of(pieces)
    held = upload(table.content, where)
    squares = torch.zeros(2, len(pieces), dtype=torch.float64, device=where)
    sums = torch.empty(table.tiles, 2, dtype=torch.float64, device=where)
    base = held.data_ptr()
    flags = (_pointer(found_inf), _pointer(factor), 0)
    arguments = _LAMB.pack(
        base, base + table.groups, *flags, sums.data_ptr(), squares.data_ptr(), table.count, table.tiles
    )
    cuda.launch(kernel, where, _blocks(cuda, kernel, where, table.tiles), arguments)
    cuda.launch(add, where, _blocks(cuda, add, where, table.count), arguments)
    return squares


def lamb_apply_(
    p: Any, m: Any, v: Any, out: Any, found_inf: Any, ratio: Tensor, lr: Any, beta1: Any, beta2: Any, eps: Any,
    weight_decay: Any, step: Any, bias_correction: bool,
) -> None:  # fmt: skip
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    many.same_sizes(p, m, v, *([out] if out else []))
    scalars = partial(cuda_scalars.lamb, multiplier=1.0, corrected=bias_correction)
    rows: Any = zip(p, [None] * len(p), m, v, low, zip(*numbers, strict=True), strict=True)
    pieces = [_piece(scalars(*own), *row) for *row, own in rows]
    where = p[0].device
    kernel = cuda_kernels.lamb("zt_lamb_apply", FP32, NONE if not out else CODES.get(out[0].dtype, FP32))
    ready = (
        ratio.dtype == torch.float32 and ratio.is_contiguous() and ratio.shape == (len(p),) and ratio.device == where
    )
    cuda = _lamb_ready(pieces, (kernel,), (found_inf,), where) if ready else None
    if cuda is None:
        many.lamb_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    table = table_of(pieces)
    held = upload(table.content, where)
    base = held.data_ptr()
    flags = (_pointer(found_inf), 0, ratio.data_ptr())
    arguments = _LAMB.pack(base, base + table.groups, *flags, 0, 0, table.count, table.tiles)
    cuda.launch(kernel, where, _blocks(cuda, kernel, where, table.tiles), arguments)


# --- sums, scalars, buffers -------------------------------------------------------------------------------------------


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares in float64, a scalar tensor; not finite if and only if an element is not. Reads ``x`` once."""
    cuda, where = cuda_backend().cuda, x.device
    kernel, level = cuda_kernels.square_sum(CODES.get(x.dtype, FP32)), cuda_kernels.sums()
    if cuda is None or x.dtype not in CODES or not x.is_contiguous() or not x.numel():
        return plain.square_sum(x)
    if not (cuda.has(kernel, where) and cuda.has(level, where)):
        return plain.square_sum(x)
    count = -(-x.numel() // ELEMENTS_PER_CHUNK)
    sums = torch.empty(count, dtype=torch.float64, device=where)
    together = 32 if x.dtype == torch.float32 else 64  # chunks per block
    cuda.launch(
        kernel,
        where,
        _blocks(cuda, kernel, where, -(-count // together)),
        _SUM.pack(x.data_ptr(), sums.data_ptr(), x.numel()),
    )
    while count > 1:
        below, count = count, -(-count // SUMS_PER_CHUNK)
        above = torch.empty(count, dtype=torch.float64, device=where)
        cuda.launch(level, where, -(-count // 8), _SUM.pack(sums.data_ptr(), above.data_ptr(), below))
        sums = above
    return sums.view(())


def step_control_(square_sum: Tensor, loss_scale: Tensor | None, control: Tensor, unscale: float, clip: float) -> None:
    """control = (norm, factor, found_inf), by one thread on the device."""
    cuda, where, kernel = cuda_backend().cuda, control.device, cuda_kernels.step_control()
    sound = control.shape == (3,) and control.dtype == torch.float32 and control.is_contiguous()
    double = square_sum.dtype == torch.float64 and square_sum.numel() == 1 and square_sum.device == where
    if cuda is None or not (sound and double and _one_float(loss_scale, where)) or not cuda.has(kernel, where):
        many.step_control_(square_sum, loss_scale, control, unscale, clip)
        return
    pointers = _CONTROL.pack(square_sum.data_ptr(), _pointer(loss_scale), control.data_ptr())
    cuda.launch(kernel, where, 1, pointers + cuda_scalars.control(unscale, clip))


def copy_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source into its target, cast."""
    _copy(into, source, add=False)


def add_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source added to its target; the sum is rounded once."""
    _copy(into, source, add=True)


def _copy(into: Sequence[Tensor], source: Sequence[Tensor], *, add: bool) -> None:
    many.same_sizes(into, source)
    cuda = cuda_backend().cuda
    left = set(range(len(into)))
    kinds: dict[tuple[int, int, torch.device], list[int]] = {}
    for index, (target, values) in enumerate(zip(into, source, strict=True)):
        if _flat(target, target.device) and _flat(values, target.device) and target.numel():
            kinds.setdefault((_code(values), _code(target), target.device), []).append(index)
    for (stored, target_stored, where), mine in kinds.items():
        kernel = cuda_kernels.copy(stored, target_stored, add)
        if cuda is None or where.type != cuda.kind or cuda.capturing() or not cuda.has(kernel, where):
            continue
        table = table_of([Piece(into[index], source[index]) for index in mine])
        held = upload(table.content, where)
        arguments = _COPY.pack(held.data_ptr(), table.count, table.tiles)
        cuda.launch(kernel, where, _blocks(cuda, kernel, where, table.tiles), arguments)
        left -= set(mine)
    rest = _pick(sorted(left), into, source)
    (many.add_many_ if add else many.copy_many_)(*rest)
