"""One HTTP/1.1 request: read off a socket with limits on its size and duration, then passed to a
route.

The reader is strict on purpose (RFC 9112): one Content-Length or one chunked Transfer-Encoding, no
folded headers, nothing that two readers could understand in two ways. docs/decisions/0022 gives the
reason why it is not a library's.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, unquote

from zero_trial.master.core import Master
from zero_trial.master.core.accounts import Principal, require_own
from zero_trial.master.records import Invalid, PermissionDenied, parse_time

if TYPE_CHECKING:
    from zero_trial.master.http.response import Response, StreamingResponse

MAX_HEAD = 32 * 1024  # bytes of request line and headers
CHUNK = 256 * 1024  # bytes asked of the socket at once
SLOWEST = 256 * 1024  # bytes a second below which a body is taken for an attack
T = TypeVar("T")
MAX_NUMBER = 2**31 - 1  # of an id, an offset or a limit on the wire
DEEPEST = 100  # levels of a body; code that walks it does so by recursion
_HEX = frozenset(b"0123456789abcdefABCDEF")
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")


class BadRequest(Exception):
    """A malformed request or one that exceeds a limit. The connection is closed after the
    answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gone(Exception):
    """The client has closed the connection, or sent nothing for too long."""


@dataclass(frozen=True)
class RequestHead:
    """Request line and headers. ``path`` is as sent, without the query; header names are in lower
    case.
    """

    method: str
    path: str
    query_text: str
    headers: Mapping[str, str]
    keep_alive: bool
    length: int | None  # of the body in bytes; None: chunked

    def bearer(self, header: str) -> str | None:
        """Return the token after ``Bearer`` in a header, if it is there."""
        scheme, _, token = self.headers.get(header, "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def parse_query(text: str) -> dict[str, list[str]]:
    """Return the fields of a query string, unquoted. Raises BadRequest."""
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=200) if text else {}
    except ValueError:
        raise BadRequest(400, "the query string has more than 200 fields") from None


def split_path(path: str) -> list[str]:
    """Split a path at its slashes and unquote the parts; empty parts are kept, so that ``a//b`` is
    not ``a/b``.
    """
    return [unquote(part) for part in path.strip("/").split("/")]


def parse_head(block: bytes) -> RequestHead:
    """Read request line and headers (without the empty line that ends them). Raises BadRequest."""
    lines = block.split(b"\r\n")
    try:
        method, target, version = lines[0].decode("ascii").split(" ")
    except ValueError:
        raise BadRequest(400, "the request line is not METHOD TARGET HTTP/1.1") from None
    if version != "HTTP/1.1":
        raise BadRequest(505, f"{version[:20]} is not supported; use HTTP/1.1")
    if not target.startswith("/") or not target.isprintable() or not method.isalpha():
        raise BadRequest(400, "the request target must be a path, the method a word")
    headers = _headers(lines[1:])
    path, _, query = target.partition("#")[0].partition("?")
    keep_alive = headers.get("connection", "").lower() != "close"
    return RequestHead(method, path, query, headers, keep_alive, _length(headers))


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
        """Return whether nothing of the next request has arrived yet."""
        return not self._buffer

    def head(self, *, idle: float, seconds: float) -> RequestHead:
        """Read the next request's head. Raises Gone, BadRequest.

        Args:
            idle: seconds to wait for its first byte.
            seconds: time for the rest.
        """
        if not self._buffer:
            self._receive(time.monotonic() + idle, MAX_HEAD)
        block = self._until(b"\r\n\r\n", MAX_HEAD, time.monotonic() + seconds, 431)
        return parse_head(block.lstrip(b"\r\n"))

    def body(self, head: RequestHead, limit: int) -> bytes | bytearray:
        """Read the body, never more than ``limit`` bytes of it. Raises BadRequest (413, 408) and
        Gone.
        """
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
        """Read up to ``mark``; the mark is removed and not returned."""
        start = 0
        while (end := self._buffer.find(mark, start)) < 0 or end > limit:
            # also where the mark came with the bytes that pass the limit
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


class Waits:
    """Counts the requests that wait for something to happen, so that they cannot take every
    connection.
    """

    def __init__(self, limit: int) -> None:
        self._free = threading.BoundedSemaphore(limit)

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Hold a place for the block, and yield whether there was one."""
        granted = self._free.acquire(blocking=False)
        try:
            yield granted
        finally:
            if granted:
                self._free.release()


@dataclass(frozen=True)
class Request:
    """A request as its route sees it: its sender is known and its body has been read.

    ``args`` are the named parts of the path, unquoted; ``numbers`` those of them that must be
    numbers; ``query`` the fields of the query string.
    """

    master: Master
    head: RequestHead
    args: Mapping[str, str]
    numbers: Mapping[str, int]
    query: Mapping[str, list[str]]
    content: bytes | bytearray
    principal: Principal
    waits: Waits

    @property
    def user(self) -> str:
        """Return the name that an experiment gets as its owner. Raises PermissionDenied for an
        allocation.
        """
        if self.principal.user is None:
            raise PermissionDenied("this needs a user's token")
        return self.principal.user.name

    def own(self, **asked: object) -> None:
        """Raise PermissionDenied if an allocation asks for what is not its own; a user may ask for
        everything.
        """
        if self.principal.allocation is not None:
            require_own(self.principal.allocation, **asked)

    def require_admin(self) -> None:
        if self.principal.user is None or not self.principal.user.admin:
            raise PermissionDenied("only an administrator may do this")

    def text(self, name: str) -> str:
        """Return a named part of the path."""
        return self.args[name]

    def number(self, name: str) -> int:
        """Return a named part of the path that is a number."""
        return self.numbers[name]

    def body(self) -> dict[str, Any]:
        """Return the JSON object that came with the request; empty if nothing came. Raises
        BadRequest.
        """
        if not self.content:
            return {}
        try:
            # from bytes, json takes half characters too
            value = json.loads(self.content.decode("utf-8"))
        except (ValueError, RecursionError):
            raise BadRequest(400, "the body is not JSON") from None
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadRequest(400, "the body is not a JSON object")
        if _may_be_odd(self.content):
            check_text(value)
        return value

    def first(self, name: str) -> str:
        """Return the first value of a field of the query string; "" if it is not there."""
        values = self.query.get(name)
        return values[0] if values else ""

    def query_number(self, name: str, default: int) -> int:
        """Return an integer of the query string. Raises Invalid."""
        text = self.first(name)
        if not text:
            return default
        return whole(text, name)

    def query_flag(self, name: str, default: bool = False) -> bool:
        text = self.first(name).lower()
        return default if not text else text in ("true", "1", "yes")

    def query_time(self, name: str) -> float | None:
        """Return a time of the query string (RFC 3339) in seconds since the epoch. Raises
        Invalid."""
        text = self.first(name)
        return parse_time(text, name) if text else None

    def query_all(self, name: str) -> list[str]:
        """Return every value of a field that may come more than once."""
        return list(self.query.get(name, ()))

    def page(self, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """Return the part of a list that ``offset`` and ``limit`` ask for, with Determined's
        ``pagination``.

        Limit 0 or -1: all; -2: only the pagination.
        """
        total = len(items)
        start = min(max(self.query_number("offset", 0), 0), total)
        limit = self.query_number("limit", 0)
        end = start if limit == -2 else total if limit <= 0 else min(start + limit, total)
        account = {"offset": start, "limit": limit, "startIndex": start, "endIndex": end, "total": total}
        return items[start:end], account


def _may_be_odd(body: bytes | bytearray) -> bool:
    """Return whether ``check_text`` could find something, without reading each value: most bodies
    are reports of a few numbers.
    """
    return b"\\u" in body or body.count(b"[") + body.count(b"{") > DEEPEST


def check_text(value: Any) -> None:
    """Raise BadRequest, with the place, for text that has no UTF-8 form (a lone surrogate) and for
    values nested too deeply.
    """
    todo: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    while todo:
        item, path = todo.pop()
        if len(path) > DEEPEST:
            raise BadRequest(400, f"the body is nested more than {DEEPEST} levels deep")
        if isinstance(item, str):
            if not _is_whole(item):
                raise BadRequest(400, f"half a character (a lone surrogate) in the text at {_place(path)}")
        elif isinstance(item, dict):
            for key, inner in item.items():
                if not _is_whole(key):
                    raise BadRequest(400, f"half a character (a lone surrogate) in a key at {_place(path)}")
                todo.append((inner, (*path, key)))
        elif isinstance(item, list):
            todo += ((inner, (*path, at)) for at, inner in enumerate(item))


def _is_whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _place(path: tuple[str | int, ...]) -> str:
    """Return a place in a body as ``$.lines[3].log``."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def whole(value: Any, name: str) -> int:
    """Return an integer in the range of an id or a count. Raises Invalid."""
    try:
        if isinstance(value, bool) or (
            isinstance(value, str) and not (value.isascii() and value.removeprefix("-").isdigit())
        ):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise Invalid(f"{name} must be a whole number", got=repr(value)[:60]) from None
    if abs(number) > MAX_NUMBER:
        raise Invalid(f"{name} is too large", got=number)
    return number


def real(value: Any, name: str) -> float:
    """Return a finite number. Raises Invalid."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Invalid(f"{name} must be a number", got=repr(value)[:60])
    return number


# -- the declaration of a route

Action = Callable[[Request], "Response | StreamingResponse"]

SMALL_BODY = 8 * 1024 * 1024  # bytes


class AuthLevel(Enum):
    """The tokens that a route takes."""

    PUBLIC = "public"  # no token is needed
    USER = "user"
    TASK = "task"
    BOTH = "both"


@dataclass(frozen=True)
class Route:
    """One method and path. A part ``{name}`` is any text, ``{name:int}`` a number. ``limit``: bytes
    of body that are read.
    """

    method: str
    path: str
    action: Action
    level: AuthLevel = AuthLevel.USER
    limit: int = SMALL_BODY
