"""The arguments of kernels: the tensors of one call are checked for overlap, and for CUDA packed
into a table in device memory.

ZtPiece, 64 bytes    p, g, a, b, out (pointers), n, number of its first tile, number of its group
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import plain
from zero_trial.ops.spec import CODES, FP32, NONE

TILE = 2048  # elements; kTile of zt_tile.h
PIECE = struct.Struct("5P3q")

_T = TypeVar("_T")


def no_derivative() -> ConfigError:
    """Return the error of a step that autograd would have to record."""
    return ConfigError(
        "an optimizer step has no derivative, and the parameter requires one",
        fix="Call it under torch.no_grad().",
    )


# Kernels read and write each element once and in no order, so the result of tensors that overlap
# would be random. Results of the checks are cached: a step is mostly called with the tensors of the
# step before.

BYTES = {-1: 0, 0: 4, 1: 2, 2: 2}  # per element, by how a float is stored
_STEP = ("parameter", "gradient", "state", "second state", "rounded copy")
_COPY = ("target", "source", "", "", "")
Interval = tuple[int, int, bool, str]  # first byte, end, whether it is written, what it is


@lru_cache(maxsize=4096)
def check_step(
    starts: tuple[int, int, int, int, int], n: int, gradient: int, copy: int, *, state: int = FP32, uses: str = "wrwww"
) -> None:
    """Raise ConfigError if tensors of one optimizer step overlap.

    Args:
        starts: addresses of parameter, gradient, states and rounded copy; 0 for none.
        n: elements of each.
        gradient, copy, state: how these are stored (CODES).
        uses: ``w`` or ``r``, written or read, for each of the five.
    """
    check(_intervals(starts, n, (0, gradient, state, state, copy), uses, _STEP, ""))


def addresses(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the addresses of up to two tensors; 0 for none."""
    first, second = (*(x.data_ptr() for x in tensors), 0, 0)[:2]
    return first, second


@lru_cache(maxsize=256)
def check_pieces(table: bytes, stored: tuple[int, int, int, int, int], uses: str) -> None:
    """Raise ConfigError if any tensors of a launch overlap. ``table`` holds its pieces; ``stored``
    and ``uses`` are of a piece's five tensors."""
    found: list[Interval] = []
    for number, (*starts, n, _, _) in enumerate(PIECE.iter_unpack(table)):
        found += _intervals(starts, n, stored, uses, _STEP, f" number {number}")
    check(found)


@lru_cache(maxsize=256)
def check_copies(table: bytes, into: int, source: int) -> None:
    """Raise ConfigError if buffers overlap that others are copied or added into; a buffer may be
    its own source."""
    found: list[Interval] = []
    for number, (*starts, n, _, _) in enumerate(PIECE.iter_unpack(table)):
        itself = starts[0] == starts[1] and into == source
        one = (starts[0], 0, 0, 0, 0) if itself else starts
        found += _intervals(one, n, (into, source, 0, 0, 0), "wrrrr", _COPY, f" number {number}")
    check(found)


def _intervals(
    starts: Sequence[int], n: int, stored: Sequence[int], uses: str, names: Sequence[str], of: str
) -> list[Interval]:
    rows = zip(starts, stored, uses, names, strict=True)
    return [(start, start + n * BYTES[code], use == "w", name + of) for start, code, use, name in rows if start and n]


def check(intervals: Sequence[Interval]) -> None:
    """Raise ConfigError if an interval that is written shares a byte with another."""
    none: Interval = (0, 0, False, "")
    # of those that begin before: which ends last, and which of the written ones
    furthest = written = none
    for one in sorted(intervals):
        before = furthest if one[2] else written
        if one[0] < before[1]:
            raise ConfigError(
                f"the {before[3]} and the {one[3]} overlap",
                got=f"bytes {before[0]:#x} to {before[1]:#x} and {one[0]:#x} to {one[1]:#x}",
                expected="no memory in common, because one of them is written",
                fix="Give each its own memory, with .clone() for example.",
            )
        furthest = max(furthest, one, key=lambda each: each[1])
        written = max(written, one, key=lambda each: each[1]) if one[2] else written


def one_float(x: Tensor | None, where: torch.device) -> bool:
    """Return whether ``x`` is one fp32 number on that device, or None."""
    return x is None or (x.dtype == torch.float32 and x.numel() == 1 and x.device == where)


def flat(x: Tensor, where: torch.device) -> bool:
    """Return whether a kernel on that device can read ``x`` as a flat array."""
    return x.is_contiguous() and x.device == where and x.dtype in CODES


def code(x: Tensor | None) -> int:
    """Return how ``x`` is stored, as a number of the kernels' macros."""
    return NONE if x is None else CODES[x.dtype]


def pointer(x: Tensor | None) -> int:
    """Return the address, or null for None."""
    return 0 if x is None else x.data_ptr()


@dataclass(frozen=True)
class LaunchItem:
    """One flat tensor of a launch; ``scalars`` is the struct of its optimizer step, empty where a
    kernel has none."""

    p: Tensor
    g: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    out: Tensor | None = None
    scalars: bytes = b""

    def packed(self, tile: int, group: int) -> bytes:
        pointers = (0 if x is None else x.data_ptr() for x in (self.p, self.g, self.a, self.b, self.out))
        return PIECE.pack(*pointers, self.p.numel(), tile, group)


def takes(piece: LaunchItem) -> bool:
    """Return whether a kernel takes the item: parameter and states in fp32, gradient and copy in
    any of the three types."""
    where = piece.p.device
    wide = [x for x in (piece.p, piece.a, piece.b) if x is not None]
    return all(flat(x, where) and x.dtype == torch.float32 for x in wide) and all(
        flat(x, where) for x in (piece.g, piece.out) if x is not None
    )


def by_kind(pieces: Sequence[LaunchItem], kind: Callable[[LaunchItem], _T]) -> dict[_T, list[int]]:
    """Group the indices of the pieces that kernels take and that have elements, by ``kind``."""
    found: dict[_T, list[int]] = {}
    for index, piece in enumerate(pieces):
        if takes(piece) and piece.p.numel():
            found.setdefault(kind(piece), []).append(index)
    return found


def items_of(
    tensors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
    pack: Callable[..., bytes],
    numbers: Sequence[Sequence[Any]],
) -> list[LaunchItem]:
    """Put lists of an op together, an item per tensor. Raises ConfigError for lists of different
    lengths or tensors of different sizes.

    Args:
        tensors: p, g, and one or two states.
        out: the copies, or empty.
        pack: a tensor's numbers -> its struct of scalars.
        numbers: a list for each number.
    """
    plain.same_sizes(*tensors, *([out] if out else []))
    plain.same_lengths(tensors[0], *numbers)
    p, g, a, *second = tensors
    b: Sequence[Tensor | None] = second[0] if second else [None] * len(p)
    low: Sequence[Tensor | None] = out or [None] * len(p)
    rows: Any = zip(p, g, a, b, low, zip(*numbers, strict=True), strict=True)
    return [LaunchItem(x, h, y, z, o, pack(*own)) for x, h, y, z, o, own in rows]


@dataclass(frozen=True)
class LaunchTable:
    """A launch's table. ``content``: the pieces, then each different struct of scalars once;
    ``groups``: where those begin, in bytes."""

    content: bytes
    groups: int
    count: int
    tiles: int


def tiles_of(n: int) -> int:
    """Return the number of tiles of n elements."""
    return -(-n // TILE)


def table_of(pieces: Sequence[LaunchItem]) -> LaunchTable:
    """Make the table of pieces, in the given order; none may be empty."""
    groups: dict[bytes, int] = {}
    rows, tile = [], 0
    for piece in pieces:
        rows.append(piece.packed(tile, groups.setdefault(piece.scalars, len(groups))))
        tile += tiles_of(piece.p.numel())
    return LaunchTable(b"".join([*rows, *groups]), PIECE.size * len(rows), len(rows), tile)


def upload(content: bytes, device: torch.device) -> Tensor:
    """Copy the bytes to device memory, in the order of the current stream; the host does not
    wait."""
    host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def doubles(*shape: int, where: torch.device, zero: bool = False) -> Tensor:
    """Allocate room for sums on the current stream; ``zero`` where not all of it is written."""
    return (torch.zeros if zero else torch.empty)(*shape, dtype=torch.float64, device=where)


def padded(arguments: bytes) -> bytes:
    """Pad arguments to the alignment of their struct, which is that of its pointers."""
    return arguments + bytes(-len(arguments) % 8) if len(arguments) % 8 else arguments


def pick(indices: Sequence[int], *lists: Sequence[Any]) -> Any:
    """Pick those elements of each list; an empty list stays empty."""
    return [[each[index] for index in indices] if each else [] for each in lists]
