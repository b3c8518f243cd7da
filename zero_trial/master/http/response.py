"""What goes back over HTTP: a whole body, or a stream whose end is not known yet."""

from __future__ import annotations

import json
import math
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zero_trial.master.records import EARLIEST, LATEST

Dict = dict[str, Any]

REASONS: Mapping[int, str] = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
BATCH = 64 * 1024  # bytes of lines that are sent together


@dataclass(frozen=True)
class Response:
    """A status and a whole body."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = "application/json"
    close: bool = False  # the connection ends with this answer


@dataclass(frozen=True)
class StreamingResponse:
    """A body in pieces. An empty piece sends nothing; the server then checks whether the client is
    still connected.
    """

    pieces: Generator[bytes, None, None]
    content_type: str = "application/json"
    done: Callable[[], None] | None = (
        None  # called once, when the stream has ended or was given up, even before its first piece
    )
    status: int = field(default=200, init=False)

    def close(self) -> None:
        """Release what the stream holds."""
        self.pieces.close()
        if self.done is not None:
            self.done()


def encode(value: Any) -> bytes:
    """Encode JSON; numbers that JSON does not know become the strings of protobuf's JSON ("NaN",
    "Infinity", "-Infinity").
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    except ValueError:
        return json.dumps(finite(value), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def finite(value: Any) -> Any:
    """Return the same value with "NaN", "Infinity" and "-Infinity" in place of numbers that are not
    finite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def ok(value: Any) -> Response:
    """Return 200 with a JSON body."""
    return Response(200, encode(value))


def failure(status: int, message: str, *, close: bool = False) -> Response:
    """Return an error with its text in the two places that Determined's clients read: ``message``
    and ``error.error``.
    """
    error = {"code": status, "reason": REASONS.get(status, "Error"), "error": message}
    return Response(status, encode({"message": message, "error": error}), close=close)


def lines(
    values: Iterable[Mapping[str, Any] | None], *, follow: bool, done: Callable[[], None] | None = None
) -> StreamingResponse:
    """Stream newline-delimited JSON, one ``{"result": value}`` per line.

    With ``follow`` every line is sent by itself; None becomes an empty piece.
    """
    encoded = (b"" if value is None else encode({"result": value}) + b"\n" for value in values)
    return StreamingResponse(encoded if follow else _batched(encoded), done=done)


def _batched(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= BATCH:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)


# A directory as a .tar.gz that is made while it is sent: nothing of it is held but one piece.


PIECE = 256 * 1024  # bytes read at once
_GZIP = 31  # zlib's window of 2**15 with a gzip header around it


def pack(directory: Path) -> Generator[bytes, None, None]:
    """Stream the plain files below ``directory``, without links, as a .tar.gz. Raises OSError if a
    file shrinks meanwhile.
    """
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


def when(seconds: float) -> str:
    """Return a time as RFC 3339 in UTC with milliseconds.

    A time that has no such form, which older masters stored, becomes the nearest that has one.
    """
    return (
        datetime.fromtimestamp(min(max(seconds, EARLIEST), LATEST), timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def maybe_when(seconds: float | None) -> str | None:
    """Return a time as `when` does; None for a time that has not come."""
    return None if seconds is None else when(seconds)
