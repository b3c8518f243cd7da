"""Grey images as something to look at: side by side on one sheet, and as a PNG file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch


def contact_sheet(images: torch.Tensor, columns: int = 8) -> torch.Tensor:
    """Images [N, 1, S, S] uint8 side by side in rows: [1, rows * S, columns * S]; places that are left are 0."""
    count, _, height, width = images.shape
    rows = -(-count // columns)
    sheet = images.new_zeros(rows * columns, height, width)
    sheet[:count] = images[:, 0]
    return sheet.view(rows, columns, height, width).permute(0, 2, 1, 3).reshape(1, rows * height, columns * width)


def write_png(path: Path, image: torch.Tensor) -> None:
    """A grey image [1, H, W] uint8 as a PNG file; the folder is made. Needs no Pillow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(_png_chunks(image)))


def _png_chunks(image: torch.Tensor) -> Iterator[bytes]:
    """The parts of a PNG file (W3C Portable Network Graphics, 3rd edition, section 11): header, one block of pixels, end."""
    _, height, width = image.shape
    rows = torch.cat(
        [image.new_zeros(height, 1), image[0]], 1
    ).contiguous()  # each row's filter, 0 for none, stands before it
    yield b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, grey
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.cpu().numpy().tobytes(), 9)), (b"IEND", b"")):
        yield struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
