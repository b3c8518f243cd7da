"""A file of lines, read in blocks from either end: what it costs is what is looked at, however long the file is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK = 64 * 1024  # bytes that are read at a time
LONGEST = 16 * 1024 * 1024  # bytes of a line; what is longer, as in a damaged file, is cut

Line = tuple[int, bytes]  # where it begins, and its bytes with the newline


def forward(path: Path, start: int = 0) -> Iterator[Line]:
    """The whole lines from byte ``start`` on, oldest first. A file that is not there has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        held: list[bytes] = []  # blocks without a newline
        place, size = start, 0
        while block := file.read(BLOCK):
            held.append(block)
            size += len(block)
            if b"\n" not in block and size < LONGEST:
                continue
            *whole, rest = b"".join(held).split(b"\n") if b"\n" in block else (b"".join(held), b"")
            for line in whole:
                yield place, line + b"\n"
                place += len(line) + 1
            held, size = [rest], len(rest)


def backward(path: Path, before: int | None = None) -> Iterator[Line]:
    """The whole lines before byte ``before`` (the file's end), newest first. What follows the last newline is not whole yet, and is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        held: list[bytes] = []  # the last first: what is read of a line whose beginning is not
        size, ended = 0, False  # ended: a newline follows what is held
        for place, block in _blocks_from_end(file, before):
            held.append(block)
            size += len(block)
            if b"\n" not in block and size < LONGEST:
                continue
            first, *whole = b"".join(reversed(held)).split(b"\n") if b"\n" in block else (b"", b"".join(reversed(held)))
            end = place + size
            for line in reversed(whole):
                end -= len(line)
                if ended:
                    yield end, line + b"\n"
                end -= 1  # the newline before it
                ended = True
            held, size = [first], len(first)
        if ended:
            yield 0, b"".join(reversed(held)) + b"\n"


def _blocks_from_end(file: BinaryIO, before: int | None) -> Iterator[tuple[int, bytes]]:
    place = file.seek(0, 2) if before is None else before
    while place > 0:
        size = min(BLOCK, place)
        place -= size
        file.seek(place)
        yield place, file.read(size)


def end_of_lines(path: Path) -> int:
    """The byte after the last newline; 0 if there is none."""
    return next((place + len(line) for place, line in backward(path)), 0)
