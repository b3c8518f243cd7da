"""The ops on CUDA tensors: a few launches of the kernels of csrc/cuda, or plain torch where no
kernel takes the tensors.

Everything a step depends on is read from device memory by the kernel, so nothing here waits for the
device: ``found_inf``, ``factor`` and, in a launch over many tensors, the table of pointers and
scalars, which is copied there in the order of the stream.

    launches    a step of one tensor 1 · of many 1 (per pair of the gradients' and the copies'
                dtypes; one tensor alone needs no table) · square_sum 1 + 1 per factor 1024 of
                chunks · LAMB 2 and 1

A CUDA graph cannot hold a table: while one is captured each tensor is a launch of its own, and
casts and LAMB are plain torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_trial.ops import arguments, cuda_runtime, plain
from zero_trial.ops.arguments import (
    LaunchItem,
    by_kind,
    check_copies,
    check_pieces,
    check_step,
    code,
    flat,
    items_of,
    no_derivative,
    one_float,
    padded,
    pick,
    pointer,
    table_of,
    takes,
    tiles_of,
)
from zero_trial.ops.cuda_runtime import CudaRuntime, Kernel
from zero_trial.ops.spec import BF16, CODES, FP32, NONE, OptimizerOp, lamb_scalars, pack_floats

# ZtUpdate of csrc/cuda/update.cu up to the op: pieces, groups, found_inf, factor, count, tiles, and
# one piece.
_NARROW = struct.Struct("2I")
_UPDATE, _ONE_PIECE, _NO_PIECE = struct.Struct("4P2q"), struct.Struct("5P3q"), bytes(64)
ELEMENTS_PER_CHUNK, SUMS_PER_CHUNK = 2048, 1024  # of zt_sums.h
_SUM, _COPY, _CONTROL = struct.Struct("2Pq"), struct.Struct("P2q"), struct.Struct("3P2d")
_LAMB = struct.Struct("7P2q")  # ZtLambLaunch of csrc/cuda/lamb.cu


def step_of(op: OptimizerOp) -> plain.Step:
    """Make the op over one tensor; it takes the arguments of its schema. One launch that needs no
    table; written for few microseconds."""
    end, two, fallback = 2 + len(op.states), len(op.states) == 2, plain.step_of(op)

    def step(*given: Any) -> None:
        numbers = given[end + 2 :]
        if op.step_at is not None:
            op.check_step(numbers[op.step_at])
        (p, g, a), b, (out, found_inf) = given[:3], given[3] if two else None, given[end : end + 2]
        if not _step(op.struct, p, g, a, b, out, found_inf, op.pack(*numbers)):
            fallback(*given)

    return step


def steps_of(op: OptimizerOp) -> plain.Step:
    """Make the op over many tensors: one launch per pair of the gradients' and the copies' dtypes,
    with a table in device memory."""
    end, count, fallback = 2 + len(op.states), len(op.number_names), plain.in_turn(op, plain.step_of(op))

    def steps(*given: Any) -> None:
        tensors, (out, found_inf, factor), rest = given[:end], given[end : end + 3], given[end + 3 :]
        columns, shared = rest[:count], rest[count:]
        if op.step_at is not None:
            for number in columns[op.step_at]:
                op.check_step(number)
        items = items_of(tensors, out, lambda *own: op.pack(*own, *shared), columns)
        left = _update(op.struct, items, found_inf, factor)
        if left:
            *lists, low = pick(left, *tensors, out)
            fallback(*lists, low, found_inf, factor, *pick(left, *columns), *shared)

    return steps


def narrow_of(op: OptimizerOp) -> plain.Step:
    """Make the op over many tensors whose states are in bf16; launches as in
    :func:`steps_of`."""

    def steps(*given: Any) -> None:
        calls, found_inf, factor, shared = plain.narrow_calls(op, given)
        cuda, left = cuda_runtime.cuda_backend().cuda, {index for index, call in enumerate(calls) if call.p.numel()}
        items = [_narrow_item(op, call, shared) for call in calls]
        kinds: dict[tuple[int, int, torch.device], list[int]] = {}
        for index in sorted(left):
            call, where = calls[index], calls[index].p.device
            known = [x for x in (call.p, call.g, call.out) if x is not None]
            if all(flat(x, where) for x in known) and all(x.device == where for x in call.states):
                kinds.setdefault((code(call.g), code(call.out), where), []).append(index)
        for (gradient, out, where), mine in kinds.items():
            if cuda is None:
                break
            kernel = cuda_runtime.narrow_update(op.struct, gradient, out)
            reachable = where.type == cuda.kind and one_float(found_inf, where) and one_float(factor, where)
            if reachable and cuda.has(kernel, where):
                if torch.is_grad_enabled() and any(calls[index].p.requires_grad for index in mine):
                    raise no_derivative()
                flags = (pointer(found_inf), pointer(factor))
                _launch(cuda, kernel, [items[index] for index in mine], (gradient, BF16, out), flags)
                left -= set(mine)
        if left and not plain.skips(found_inf):
            plain.step_narrow(op, [calls[index] for index in sorted(left)], factor, shared)

    return steps


def _narrow_item(op: OptimizerOp, call: plain.NarrowCall, shared: Sequence[Any]) -> LaunchItem:
    """Return the item of a launch; its scalars begin with the noise (Scalars of update.cu)."""
    head = _NARROW.pack(call.key, call.first & 0xFFFFFFFF)
    second = call.states[1] if len(call.states) > 1 else None
    return LaunchItem(call.p, call.g, call.states[0], second, call.out, head + op.pack(*call.own, *shared))


def arguments_of(
    flags: tuple[int, int], pointers: tuple[int, int, int, int, int], n: int, tiles: int, scalars: bytes
) -> bytes:
    """Pack a launch that holds its one piece. ``flags``: found_inf, factor; ``pointers``: p, g, two
    states, out; null for none."""
    return padded(_UPDATE.pack(0, 0, *flags, 1, tiles) + _ONE_PIECE.pack(*pointers, n, 0, 0) + scalars)


def _step(
    op: str, p: Tensor, g: Tensor, a: Tensor, b: Tensor | None, out: Tensor | None, found: Tensor | None, scalars: bytes
) -> bool:
    """Step one tensor; return False where plain torch must. Written for few microseconds."""
    if p.requires_grad and torch.is_grad_enabled():
        raise no_derivative()
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
    check_step(pointers, n, stored, copied)
    tiles, flag = tiles_of(n), 0 if found is None else found.data_ptr()
    cuda.fill(kernel, where, tiles, arguments_of((flag, 0), pointers, n, tiles, scalars))
    return True


def _update(op: str, pieces: Sequence[LaunchItem], found_inf: Tensor | None, factor: Tensor | None) -> list[int]:
    """Step all pieces that kernels take; return the indices of the others."""
    left = [index for index, piece in enumerate(pieces) if piece.p.numel()]
    cuda = cuda_runtime.cuda_backend().cuda
    if cuda is None or not left:
        return left
    for (gradient, out, where), mine in by_kind(pieces, lambda q: (code(q.g), code(q.out), q.p.device)).items():
        kernel = cuda_runtime.update(op, gradient, out)
        reachable = where.type == cuda.kind and one_float(found_inf, where) and one_float(factor, where)
        if reachable and cuda.has(kernel, where):
            chosen = [pieces[index] for index in mine]
            if torch.is_grad_enabled() and any(piece.p.requires_grad for piece in chosen):
                raise no_derivative()
            _launch(cuda, kernel, chosen, (gradient, FP32, out), (pointer(found_inf), pointer(factor)))
            done = set(mine)
            left = [index for index in left if index not in done]
    return left


def _launch(
    cuda: CudaRuntime,
    kernel: Kernel,
    pieces: Sequence[LaunchItem],
    stored: tuple[int, int, int],
    flags: tuple[int, int],
) -> None:
    where, (gradient, state, out) = pieces[0].p.device, stored
    if len(pieces) == 1 or cuda.capturing(where):  # no table to copy, which a graph could not hold
        for one in pieces:
            pointers = (one.p.data_ptr(), pointer(one.g), pointer(one.a), pointer(one.b), pointer(one.out))
            n, tiles = one.p.numel(), tiles_of(one.p.numel())
            check_step(pointers, n, gradient, out, state=state)
            cuda.fill(kernel, where, tiles, arguments_of(flags, pointers, n, tiles, one.scalars))
        return
    table = table_of(pieces)
    check_pieces(table.content[: table.groups], (FP32, gradient, state, state, out), "wrwww")
    held = arguments.upload(table.content, where)
    base = held.data_ptr()
    head = _UPDATE.pack(base, base + table.groups, *flags, table.count, table.tiles)
    packed = head + _NO_PIECE + bytes(len(pieces[0].scalars))
    cuda.fill(kernel, where, table.tiles, padded(packed))


def _runtime_for_all(
    pieces: Sequence[LaunchItem], kernels: Sequence[Kernel], flags: Sequence[Tensor | None], where: torch.device
) -> CudaRuntime | None:
    """Return the runtime if it can launch the kernels on all items at once."""
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
    """As :func:`zero_trial.ops.plain.lamb_moments_`, which updates what the kernel does not
    take."""
    numbers = (beta1, beta2, eps, weight_decay, step)
    if not p:
        return plain.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    pieces = items_of(
        (p, g, m, v), (), lambda *own: pack_floats(lamb_scalars((0.0, *own), multiplier, bias_correction)), numbers
    )
    where, gradient = p[0].device, CODES.get(g[0].dtype, FP32)
    kernel = cuda_runtime.lamb("zt_lamb_moments", gradient, NONE)
    add = cuda_runtime.lamb("zt_lamb_squares", FP32, NONE)
    cuda = _runtime_for_all(pieces, (kernel, add), (found_inf, factor), where)
    if cuda is None:
        return plain.lamb_moments_(p, g, m, v, found_inf, factor, *numbers, multiplier, bias_correction)
    table = table_of(pieces)
    check_pieces(table.content[: table.groups], (FP32, gradient, FP32, FP32, NONE), "rrwwr")
    held = arguments.upload(table.content, where)
    squares = arguments.doubles(2, len(pieces), where=where, zero=True)
    sums = arguments.doubles(table.tiles, 2, where=where)
    base = held.data_ptr()
    flags = (pointer(found_inf), pointer(factor), 0)
    packed = _LAMB.pack(
        base, base + table.groups, *flags, sums.data_ptr(), squares.data_ptr(), table.count, table.tiles
    )
    cuda.fill(kernel, where, table.tiles, packed)
    cuda.fill(add, where, table.count, packed)
    return squares


def lamb_apply_(
    p: Any, m: Any, v: Any, out: Any, found_inf: Any, ratio: Tensor, lr: Any, beta1: Any, beta2: Any, eps: Any,
    weight_decay: Any, step: Any, bias_correction: bool,
) -> None:  # fmt: skip
    """As :func:`zero_trial.ops.plain.lamb_apply_`, which updates what the kernel does not take."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    if not p:
        return
    low: Sequence[Tensor | None] = out or [None] * len(p)
    plain.same_sizes(p, m, v, *([out] if out else []))
    plain.same_lengths(p, *numbers)
    rows: Any = zip(p, [None] * len(p), m, v, low, zip(*numbers, strict=True), strict=True)
    pieces = [
        LaunchItem(x, h, y, z, o, pack_floats(lamb_scalars(own, 1.0, bias_correction))) for x, h, y, z, o, own in rows
    ]
    where, copied = p[0].device, CODES.get(out[0].dtype, FP32) if out else NONE
    kernel = cuda_runtime.lamb("zt_lamb_apply", FP32, copied)
    ready = (
        ratio.dtype == torch.float32 and ratio.is_contiguous() and ratio.shape == (len(p),) and ratio.device == where
    )
    cuda = _runtime_for_all(pieces, (kernel,), (found_inf,), where) if ready else None
    if cuda is None:
        plain.lamb_apply_(p, m, v, out, found_inf, ratio, *numbers, bias_correction)
        return
    table = table_of(pieces)
    check_pieces(table.content[: table.groups], (FP32, NONE, FP32, FP32, copied), "wrrrw")
    held = arguments.upload(table.content, where)
    base = held.data_ptr()
    flags = (pointer(found_inf), 0, ratio.data_ptr())
    packed = _LAMB.pack(base, base + table.groups, *flags, 0, 0, table.count, table.tiles)
    cuda.fill(kernel, where, table.tiles, packed)


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, a scalar tensor; not finite if and only if an element
    is not. Reads ``x`` once."""
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
    """Write control = (norm, factor, found_inf), by one thread on the device."""
    cuda, where, kernel = cuda_runtime.cuda_backend().cuda, control.device, cuda_runtime.step_control()
    sound = control.shape == (3,) and control.dtype == torch.float32 and control.is_contiguous()
    double = square_sum.dtype == torch.float64 and square_sum.numel() == 1 and square_sum.device == where
    if cuda is None or not (sound and double and one_float(loss_scale, where)) or not cuda.has(kernel, where):
        plain.step_control_(square_sum, loss_scale, control, unscale, clip)
        return
    pointers = (square_sum.data_ptr(), pointer(loss_scale), control.data_ptr())
    cuda.launch(kernel, where, 1, _CONTROL.pack(*pointers, unscale, clip))


def copy_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy and cast each source into its target."""
    _copy(into, source, add=False)


def add_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Add each source to its target; the sum is rounded once."""
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
        check_copies(table.content[: table.groups], target_stored, stored)
        held = arguments.upload(table.content, where)
        packed = _COPY.pack(held.data_ptr(), table.count, table.tiles)
        cuda.fill(kernel, where, table.tiles, packed)
        left -= set(mine)
    rest = pick(sorted(left), into, source)
    (plain.add_many_ if add else plain.copy_many_)(*rest)
