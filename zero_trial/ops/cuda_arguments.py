"""What CUDA kernels take: which tensors, and in which words of a launch's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import many
from zero_trial.ops.cuda_kernels import BF16, FP16, FP32, NONE
from zero_trial.ops.cuda_tables import Piece

CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_T = TypeVar("_T")


def one_float(x: Tensor | None, where: torch.device) -> bool:
    """Whether it is one fp32 number on that device, or not given."""
    return x is None or (x.dtype == torch.float32 and x.numel() == 1 and x.device == where)


def flat(x: Tensor, where: torch.device) -> bool:
    """Whether a kernel there can walk over it."""
    return x.is_contiguous() and x.device == where and x.dtype in CODES


def takes(piece: Piece) -> bool:
    """Parameter and states in fp32, gradient and copy in any of the three."""
    where = piece.p.device
    wide = [x for x in (piece.p, piece.a, piece.b) if x is not None]
    return all(flat(x, where) and x.dtype == torch.float32 for x in wide) and all(
        flat(x, where) for x in (piece.g, piece.out) if x is not None
    )


def code(x: Tensor | None) -> int:
    """How it is stored, as the kernels' macros say it."""
    return NONE if x is None else CODES[x.dtype]


def pointer(x: Tensor | None) -> int:
    """Its address, or null."""
    return 0 if x is None else x.data_ptr()


def by_kind(pieces: Sequence[Piece], kind: Callable[[Piece], _T]) -> dict[_T, list[int]]:
    """Numbers of the pieces that kernels can take and that have elements, by ``kind``."""
    found: dict[_T, list[int]] = {}
    for index, piece in enumerate(pieces):
        if takes(piece) and piece.p.numel():
            found.setdefault(kind(piece), []).append(index)
    return found


def pieces_of(
    tensors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
    scalars: Callable[..., bytes],
    numbers: Sequence[Sequence[Any]],
) -> list[Piece]:
    """p, g, one or two states, the copies, and each tensor's struct of scalars. Raises ConfigError where lists do not fit."""
    many.same_sizes(*tensors, *([out] if out else []))
    many.same_lengths(tensors[0], *numbers)
    p, g, a, *second = tensors
    b: Sequence[Tensor | None] = second[0] if second else [None] * len(p)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    rows: Any = zip(p, g, a, b, low, zip(*numbers, strict=True), strict=True)
    return [Piece(x, h, y, z, o, scalars(*own)) for x, h, y, z, o, own in rows]


def no_graph(p: Tensor) -> None:
    """Raises ConfigError where autograd would have to know of the step."""
    if p.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "an optimizer step has no derivative, and the parameter requires one",
            fix="Call it under torch.no_grad().",
        )


def numbered(step: float) -> None:
    """Raises ConfigError for a step before the first."""
    if not step >= 1:
        raise ConfigError("steps of Adam are numbered from 1", where="adam_", got=step)


def padded(arguments: bytes) -> bytes:
    """To the alignment of the struct, that of its pointers."""
    return arguments + bytes(-len(arguments) % 8) if len(arguments) % 8 else arguments


def pick(indices: Sequence[int], *lists: Sequence[Any]) -> Any:
    """Those numbers of each list; an empty list stays empty."""
    return [[each[index] for index in indices] if each else [] for each in lists]
