"""Device memory of a launch: tables of the flat tensors that it works on, as the bytes that kernels read, and room for its sums.

ZtPiece, 64 bytes    p, g, a, b, out (pointers), n, number of its first tile, number of its group
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 2048  # elements; kTile of zt_tile.h
PIECE = struct.Struct("5P3q")


@dataclass(frozen=True)
class Piece:
    """One flat tensor of a launch; ``scalars`` is the struct of its optimizer step, empty where a kernel has none."""

    p: Tensor
    g: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    out: Tensor | None = None
    scalars: bytes = b""

    def pack(self, tile: int, group: int) -> bytes:
        pointers = (0 if x is None else x.data_ptr() for x in (self.p, self.g, self.a, self.b, self.out))
        return PIECE.pack(*pointers, self.p.numel(), tile, group)


@dataclass(frozen=True)
class Table:
    """``content``: the pieces, then each different struct of scalars once. ``groups``: where those begin, in bytes."""

    content: bytes
    groups: int
    count: int
    tiles: int


def tiles_of(n: int) -> int:
    """Tiles that n elements take."""
    return -(-n // TILE)


def table_of(pieces: Sequence[Piece]) -> Table:
    """Pieces in the given order; none may be empty."""
    groups: dict[bytes, int] = {}
    rows, tile = [], 0
    for piece in pieces:
        rows.append(piece.pack(tile, groups.setdefault(piece.scalars, len(groups))))
        tile += tiles_of(piece.p.numel())
    return Table(b"".join([*rows, *groups]), PIECE.size * len(rows), len(rows), tile)


def upload(content: bytes, device: torch.device) -> Tensor:
    """The bytes in device memory, in the order of the current stream; the host does not wait."""
    host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def doubles(*shape: int, where: torch.device, zero: bool = False) -> Tensor:
    """Room for sums, of the current stream; ``zero`` where nobody writes all of it."""
    return (torch.zeros if zero else torch.empty)(*shape, dtype=torch.float64, device=where)
