"""A directory as a .tar.gz that is made while it is sent: nothing of it is held but one piece."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

PIECE = 256 * 1024  # bytes read at once
_GZIP = 31  # zlib's window of 2**15 with a gzip header around it


def pack(directory: Path) -> Generator[bytes, None, None]:
    """The plain files below ``directory``, links left out, by their paths relative to it. A file that shrinks meanwhile breaks the archive off."""
    squeeze = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    for block in _blocks(directory):
        if piece := squeeze.compress(block):
            yield piece
    yield squeeze.flush()


def _blocks(directory: Path) -> Iterator[bytes]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield from _file(path, path.relative_to(directory).as_posix())
    yield bytes(2 * tarfile.BLOCKSIZE)


def _file(path: Path, name: str) -> Iterator[bytes]:
    with path.open("rb") as stream:
        info = tarfile.TarInfo(name)
        info.size = path.stat().st_size
        info.mode = 0o644
        info.mtime = int(path.stat().st_mtime)
        yield info.tobuf(tarfile.PAX_FORMAT)
        left = info.size
        while left:
            data = stream.read(min(PIECE, left))
            if not data:
                raise OSError(f"{name} became shorter while it was read")
            left -= len(data)
            yield data
    yield bytes(-info.size % tarfile.BLOCKSIZE)
