"""One HTTP/1.1 request, read off a socket with limits on its size and on the time that it may take.

Strict on purpose (RFC 9112): one Content-Length or one chunked Transfer-Encoding, no folded headers, nothing that two readers could read in two ways.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote

MAX_HEAD = 32 * 1024  # bytes of request line and headers
CHUNK = 256 * 1024  # bytes asked of the socket at once
SLOWEST = 256 * 1024  # bytes a second below which a body is taken for an attack
_HEX = frozenset(b"0123456789abcdefABCDEF")
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")


class BadRequest(Exception):
    """What came is not a request that will be answered as asked: ``status`` and one line. The connection is closed after the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gone(Exception):
    """The other side has closed the connection, or said nothing for too long."""


@dataclass(frozen=True)
class Head:
    """Request line and headers. ``path`` is as sent, without the query; header names are in lower case."""

    method: str
    path: str
    query_text: str
    headers: Mapping[str, str]
    keep_alive: bool
    length: int | None  # of the body in bytes; None: chunked

    def bearer(self, header: str) -> str | None:
        """The token after ``Bearer`` in a header, if it is there."""
        scheme, _, token = self.headers.get(header, "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None


@dataclass(frozen=True)
class Request:
    """A request with its body, as the routes see it. ``args`` are the named parts of the path, unquoted."""

    head: Head
    args: Mapping[str, str]
    body: bytes | bytearray
    query: Mapping[str, list[str]] = field(default_factory=dict)

    def first(self, name: str, default: str = "") -> str:
        values = self.query.get(name)
        return values[0] if values else default


def parse_query(text: str) -> dict[str, list[str]]:
    """The fields of a query string, unquoted. Raises BadRequest."""
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=200) if text else {}
    except ValueError:
        raise BadRequest(400, "the query string has more than 200 fields") from None


def split_path(path: str) -> list[str]:
    """The parts between slashes, unquoted; empty parts are kept, so that ``a//b`` is not ``a/b``."""
    return [unquote(part) for part in path.strip("/").split("/")]


def parse_head(block: bytes) -> Head:
    """Read request line and headers (without the empty line that ends them). Raises BadRequest."""
    lines = block.split(b"\r\n")
    try:
        method, target, version = lines[0].decode("ascii").split(" ")
    except ValueError:
        raise BadRequest(400, "the request line is not METHOD TARGET HTTP/1.1") from None
    if version != "HTTP/1.1":
        raise BadRequest(505, f"{version[:20]} is not spoken here; HTTP/1.1 is")
    if not target.startswith("/") or not target.isprintable() or not method.isalpha():
        raise BadRequest(400, "the request target must be a path, the method a word")
    headers = _headers(lines[1:])
    path, _, query = target.partition("#")[0].partition("?")
    keep_alive = headers.get("connection", "").lower() != "close"
    return Head(method, path, query, headers, keep_alive, _length(headers))


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name = name.lower()
        if not colon or not name or not _TOKEN.issuperset(name):
            raise BadRequest(400, "a header line is not NAME: VALUE")
        if name in headers and name in ("host", "content-length", "transfer-encoding", "authorization", "origin"):
            raise BadRequest(400, f"the header {name} came twice")
        headers[name] = value.strip()
    return headers


def _length(headers: Mapping[str, str]) -> int | None:
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or length is not None:
            raise BadRequest(400, "a body is either chunked or has a Content-Length")
        return None
    if length is None:
        return 0
    if not length.isascii() or not length.isdigit() or len(length) > 15:
        raise BadRequest(400, "Content-Length is not a number of bytes")
    return int(length)


class Reader:
    """Reads requests off one socket, each read with the time that is left until a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    @property
    def waiting(self) -> bool:
        """Nothing of a next request has come yet."""
        return not self._buffer

    def head(self, *, idle: float, seconds: float) -> Head:
        """The next request's head: wait ``idle`` seconds for its first byte, then ``seconds`` for the rest. Raises Gone, BadRequest."""
        if not self._buffer:
            self._receive(time.monotonic() + idle, MAX_HEAD)
        block = self._until(b"\r\n\r\n", MAX_HEAD, time.monotonic() + seconds, 431)
        return parse_head(block.lstrip(b"\r\n"))

    def body(self, head: Head, limit: int) -> bytes | bytearray:
        """The body, never more than ``limit`` bytes of it in memory. Raises BadRequest (413, 408) and Gone."""
        if head.length is None:
            return self._chunked(limit)
        if head.length > limit:
            raise BadRequest(413, f"the body has {head.length} bytes, at most {limit} are accepted here")
        deadline = time.monotonic() + 10 + head.length / SLOWEST
        return self._exactly(head.length, deadline)

    def _chunked(self, limit: int) -> bytearray:
        body = bytearray()
        deadline = time.monotonic() + 10 + limit / SLOWEST
        while True:
            size_text = self._until(b"\r\n", 1024, deadline, 400).partition(b";")[0].strip()
            try:
                size = int(size_text, 16) if _HEX.issuperset(size_text) else -1
            except ValueError:
                size = -1
            if size < 0:
                raise BadRequest(400, "a chunk does not begin with its size")
            if len(body) + size > limit:
                raise BadRequest(413, f"the body has more than the {limit} bytes that are accepted here")
            if size == 0:
                while self._until(b"\r\n", 1024, deadline, 400):  # trailers are read and forgotten
                    pass
                return body
            body += self._exactly(size, deadline)
            if self._exactly(2, deadline) != b"\r\n":
                raise BadRequest(400, "a chunk is longer than its size")

    def _exactly(self, count: int, deadline: float) -> bytearray:
        while len(self._buffer) < count:
            self._receive(deadline, min(CHUNK, count - len(self._buffer)))
        if len(self._buffer) == count:  # the usual case; a large body is not copied
            taken, self._buffer = self._buffer, bytearray()
            return taken
        taken = self._buffer[:count]
        del self._buffer[:count]
        return taken

    def _until(self, mark: bytes, limit: int, deadline: float, status: int) -> bytes:
        """What comes before ``mark``, which is taken off as well."""
        start = 0
        while (end := self._buffer.find(mark, start)) < 0:
            if len(self._buffer) > limit:
                raise BadRequest(status, f"a line or the headers are longer than {limit} bytes")
            start = max(0, len(self._buffer) - len(mark) + 1)
            self._receive(deadline, 16 * 1024)
        taken = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return taken

    def _receive(self, deadline: float, count: int) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise BadRequest(408, "the request came too slowly")
        self._sock.settimeout(left)
        try:
            data = self._sock.recv(count)
        except TimeoutError:
            raise (BadRequest(408, "the request came too slowly") if self._buffer else Gone("silent")) from None
        except OSError as error:
            raise Gone(str(error)) from None
        if not data:
            raise Gone("closed")
        self._buffer += data
