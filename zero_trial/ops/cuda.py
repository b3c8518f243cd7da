"""The ops on CUDA tensors: a few launches of the kernels of csrc/cuda, or plain torch if no kernel
supports the tensors. Nothing here waits for the device: the table of pointers and scalars of
a launch over many tensors is copied to the device in the order of the stream.

    launches    a step 1 (per pair of the gradients' and the copies' dtypes; one tensor alone needs
                no table) · square_sum 1 + 1 per factor 1024 of chunks
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import cuda_runtime, plain
from zero_trial.ops.cuda_runtime import CudaRuntime, Kernel
from zero_trial.ops.plain import TensorStep
from zero_trial.ops.spec import BF16, CODES, FP32, NONE, OptimizerOp

TILE = 2048  # elements; kTile of zt_tile.h
# ZtPiece: p, g, a, b, out (pointers), n, number of its first tile, number of its group
PIECE = struct.Struct("5P3q")
# ZtUpdate of csrc/cuda/update.cu up to the piece: pieces, groups, count, tiles
_UPDATE, _NOISE = struct.Struct("2P2q"), struct.Struct("2I")
ELEMENTS_PER_CHUNK, SUMS_PER_CHUNK = 2048, 1024  # of zt_sums.h
_SUM = struct.Struct("2Pq")

Kind = tuple[int, int, int, torch.device]  # how gradient, states and copy are stored, and where


def take_steps(op: OptimizerOp, *given: Any) -> None:
    """Step all tensors of an op: one launch per kind, plain torch if no kernel supports them."""
    cuda = cuda_runtime.cuda_backend().native
    steps, shared = plain.steps_of(op, given)
    kinds: dict[Kind | None, list[TensorStep]] = {}
    for step in steps:
        if step.p.numel():
            kinds.setdefault(_kind(step), []).append(step)
    for kind, mine in kinds.items():
        if cuda is not None and kind is not None and kind[-1].type == cuda.kind:
            gradient, state, out, where = kind
            kernel = cuda_runtime.update(op.struct, gradient, out, state)
            if cuda.has(kernel, where):
                scalars = []  # Scalars of update.cu, which begin with the noise
                for step in mine:
                    key, first = step.noise or (0, 0)
                    noise = _NOISE.pack(key, first & 0xFFFFFFFF) * (step.noise is not None)
                    scalars.append(noise + op.pack(*step.own, *shared))
                _launch(cuda, kernel, where, mine, scalars)
                continue
        for step in mine:
            plain.take_step(op, step, shared)


def _kind(step: TensorStep) -> Kind | None:
    """Return what a kernel must be compiled for; None if no kernel supports the tensors."""
    if not step.native:
        return None
    out = NONE if step.out is None else CODES[step.out.dtype]
    return CODES[step.g.dtype], BF16 if step.noise else FP32, out, step.p.device


def _launch(
    cuda: CudaRuntime, kernel: Kernel, where: torch.device, steps: Sequence[TensorStep], scalars: Sequence[bytes]
) -> None:
    if len(steps) == 1:
        tiles = _tiles_of(steps[0])
        packed = _UPDATE.pack(0, 0, 1, tiles) + _piece(steps[0], 0, 0) + scalars[0]
    else:
        table = _table_of(steps, scalars)
        held = upload(table.content, where)  # until the launch is in the stream
        base, tiles = held.data_ptr(), table.tiles
        packed = _UPDATE.pack(base, base + table.groups, len(steps), tiles) + bytes(PIECE.size + len(scalars[0]))
    # padded to the alignment of their struct, which is that of its pointers
    cuda.fill(kernel, where, tiles, packed + bytes(-len(packed) % 8))


class LaunchTable(NamedTuple):
    """A launch's table. ``content``: the pieces, then each different struct of scalars once;
    ``groups``: where those begin, in bytes."""

    content: bytes
    groups: int
    tiles: int


def _table_of(steps: Sequence[TensorStep], scalars: Sequence[bytes]) -> LaunchTable:
    """Make the table of tensors, in the given order; none may be empty."""
    groups: dict[bytes, int] = {}
    rows, tile = [], 0
    for step, own in zip(steps, scalars, strict=True):
        rows.append(_piece(step, tile, groups.setdefault(own, len(groups))))
        tile += _tiles_of(step)
    return LaunchTable(b"".join([*rows, *groups]), PIECE.size * len(rows), tile)


def _piece(step: TensorStep, tile: int, group: int) -> bytes:
    a, *b = step.states
    pointers = (0 if x is None else x.data_ptr() for x in (step.p, step.g, a, b[0] if b else None, step.out))
    return PIECE.pack(*pointers, step.p.numel(), tile, group)


def _tiles_of(step: TensorStep) -> int:
    return -(-step.p.numel() // TILE)


def upload(content: bytes, device: torch.device) -> Tensor:
    """Copy the bytes to device memory, in the order of the current stream; the host does not wait.
    Raises ConfigError in a capture: a replay would copy the host memory's later content."""
    host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if device.type != "cuda":
        return host
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a CUDA graph cannot contain a step over several tensors", fix="Call step() outside of the graph."
        )
    return host.pin_memory().to(device, non_blocking=True)


def doubles(*shape: int, where: torch.device) -> Tensor:
    """Allocate room for sums on the current stream."""
    return torch.empty(*shape, dtype=torch.float64, device=where)


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, non-finite if an element is. Reads ``x`` once."""
    cuda, where = cuda_runtime.cuda_backend().native, x.device
    kernel, level = cuda_runtime.square_sum(CODES.get(x.dtype, FP32)), cuda_runtime.sums()
    if cuda is None or x.dtype not in CODES or not x.is_contiguous() or not x.numel():
        return plain.square_sum(x)
    if not (cuda.has(kernel, where) and cuda.has(level, where)):
        return plain.square_sum(x)
    count = -(-x.numel() // ELEMENTS_PER_CHUNK)
    sums = doubles(count, where=where)
    together = 32 if x.dtype == torch.float32 else 64  # chunks per block
    cuda.fill(kernel, where, -(-count // together), _SUM.pack(x.data_ptr(), sums.data_ptr(), x.numel()))
    while count > 1:
        below, count = count, -(-count // SUMS_PER_CHUNK)
        above = doubles(count, where=where)
        cuda.launch(level, where, -(-count // 8), _SUM.pack(sums.data_ptr(), above.data_ptr(), below))
        sums = above
    return sums.view(())
