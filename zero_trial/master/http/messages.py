"""Requests and responses as seen by routes, and the declaration of routes."""

from __future__ import annotations

import base64
import json
import math
import tarfile
import threading
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote

from zero_trial.master.core import Master
from zero_trial.master.core.accounts import Principal, require_own, require_owner
from zero_trial.master.records import Invalid, PermissionDenied, User, parse_time
from zero_trial.util.text import spell_nonfinite

Dict = dict[str, Any]
T = TypeVar("T")
_MAX_NUMBER = 2**31 - 1  # for ids, offsets and limits in requests
DEEPEST = 100  # maximum nesting of a body; code that walks a body is recursive


class BadRequest(Exception):
    """A malformed or oversized request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RequestHead:
    """Request line and headers; header names are in lower case."""

    method: str
    path: str
    query_text: str
    headers: Mapping[str, str]
    length: int  # of the body in bytes

    def bearer(self, header: str) -> str | None:
        """Return the token after ``Bearer`` in a header; None if there is none."""
        scheme, _, token = self.headers.get(header, "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def parse_query(text: str) -> dict[str, list[str]]:
    """Return the fields of a query string, unquoted. Raises BadRequest."""
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=200) if text else {}
    except ValueError:
        raise BadRequest(400, "the query string has more than 200 fields") from None


def split_path(path: str) -> list[str]:
    """Split a path at slashes and unquote its parts; ``a//b`` contains an empty part."""
    parts = path.strip("/").split("/")
    return [unquote(part) for part in parts] if "%" in path else parts


class Waits:
    """Counts waiting requests, so that they cannot occupy all threads."""

    def __init__(self, limit: int) -> None:
        self._free = threading.BoundedSemaphore(limit)

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Try to reserve a place for the duration of the block; yield whether one was free."""
        granted = self._free.acquire(blocking=False)
        try:
            yield granted
        finally:
            if granted:
                self._free.release()


@dataclass(frozen=True)
class Request:
    """A request as its route sees it: the sender is known and the body has been read.

    ``args`` are the named parts of the path, unquoted; ``numbers`` are the args that must be
    integers, parsed; ``query`` contains the fields of the query string.
    """

    master: Master
    head: RequestHead
    args: Mapping[str, str]
    numbers: Mapping[str, int]
    query: Mapping[str, list[str]]
    content: bytes
    principal: Principal
    waits: Waits

    @property
    def number(self) -> int:
        """Return the only integer in the path."""
        (number,) = self.numbers.values()
        return number

    @property
    def user(self) -> User:
        """Return the user who sent the request. Raises PermissionDenied for an allocation."""
        if self.principal.user is None:
            raise PermissionDenied("this request needs a user's token")
        return self.principal.user

    def user_ids(self) -> dict[str, int]:
        """Return the ids of all users by name."""
        return {user.name: user.id for user in self.master.accounts.users()}

    def own(self, **asked: object) -> None:
        """Raise PermissionDenied if an allocation requests something that is not its own."""
        if self.principal.allocation is not None:
            require_own(self.principal.allocation, **asked)

    def require_admin(self) -> None:
        if self.principal.user is None or not self.principal.user.admin:
            raise PermissionDenied("only an administrator may do this")

    def require_owner(self, owner: str, name: str) -> None:
        """Raise PermissionDenied unless the sender owns ``name``, or is an administrator."""
        require_owner(self.user, owner, name)

    def body(self) -> dict[str, Any]:
        """Return the JSON object in the body; empty if there is no body. Raises BadRequest."""
        value = self._json()
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadRequest(400, "the body is not a JSON object")
        return value

    def list_body(self) -> list[Any]:
        """Return the JSON list in the body. Raises BadRequest."""
        value = self._json()
        if not isinstance(value, list):
            raise BadRequest(400, "the body is not a JSON list")
        return value

    def _json(self) -> Any:
        """Return the JSON value in the body; None if there is no body. Raises BadRequest."""
        if not self.content:
            return None
        try:
            # decode first: given bytes, json would also accept lone surrogates
            value = json.loads(self.content.decode("utf-8"))
        except (ValueError, RecursionError):
            raise BadRequest(400, "the body is not JSON") from None
        # avoid a full walk in the usual case: most bodies are reports of a few numbers
        if b"\\u" in self.content or self.content.count(b"[") + self.content.count(b"{") > DEEPEST:
            _check_text(value)
        return value

    def first(self, name: str) -> str:
        """Return the first value of a query string field; "" if the field is missing."""
        values = self.query.get(name)
        return values[0] if values else ""

    def query_number(self, name: str) -> int:
        """Return an integer query string field; 0 if it is missing. Raises Invalid."""
        text = self.first(name)
        return whole(text, name) if text else 0

    def query_flag(self, name: str) -> bool:
        return self.first(name).lower() in ("true", "1", "yes")

    def query_time(self, name: str) -> float | None:
        """Return a time from the query string in seconds since the epoch. Raises Invalid."""
        text = self.first(name)
        return parse_time(text, name) if text else None

    def query_all(self, name: str) -> list[str]:
        """Return every value of a repeatable field."""
        return list(self.query.get(name, ()))

    def passes(self, name: str, value: str) -> bool:
        """Return whether a query field contains this value, or is missing."""
        return name not in self.query or value in self.query[name]

    def passes_switch(self, name: str, value: bool) -> bool:
        """Return whether a boolean field is missing or has this value."""
        asked = self.first(name).lower()
        return not asked or value == (asked == "true")

    @property
    def descending(self) -> bool:
        return self.first("orderBy") == "ORDER_BY_DESC"

    def page(self, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """Return the part of a list selected by ``offset`` and ``limit``, with Determined's
        ``pagination``.

        Limit 0 or -1: all items; -2: only the pagination.
        """
        found = self.window(len(items))
        return items[found["startIndex"] : found["endIndex"]], found

    def listed(self, name: str, items: Sequence[T], render: Callable[[T], Any]) -> Dict:
        """Return a response with the requested part of a list; see `page`."""
        page, pagination = self.page(items)
        return {name: [render(item) for item in page], "pagination": pagination}

    def window(self, total: int) -> dict[str, int]:
        """Return the ``pagination`` of a list of ``total`` items; see `page`."""
        offset, limit = max(self.query_number("offset"), 0), self.query_number("limit")
        start = min(offset, total)
        end = start if limit == -2 else total if limit <= 0 else min(start + limit, total)
        return {"offset": offset, "limit": limit, "startIndex": start, "endIndex": end, "total": total}


def _check_text(value: Any, place: str = "$", depth: int = 0) -> None:
    """Raise BadRequest, with the location, for lone surrogates and too deeply nested values."""
    if depth > DEEPEST:
        raise BadRequest(400, f"the body is nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRequest(400, f"invalid Unicode (unpaired surrogate) at {place}") from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key, f"a key of {place}", depth)
            _check_text(inner, f"{place}.{key}", depth + 1)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            _check_text(inner, f"{place}[{at}]", depth + 1)


def whole(value: Any, name: str) -> int:
    """Return ``value`` as an integer in the range of an id or a count. Raises Invalid."""
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
    if abs(number) > _MAX_NUMBER:
        raise Invalid(f"{name} is too large", got=number)
    return number


def text_in(body: Mapping[str, Any], name: str) -> str | None:
    """Return a string field of a body; None if the field is missing. Raises Invalid."""
    value = body.get(name)
    if not isinstance(value, str | None):
        raise Invalid(f"{name} must be a string")
    return value


def texts(value: Any, name: str) -> list[str]:
    """Return the strings of a list, without duplicates. Raises Invalid."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Invalid(f"{name} must be a list of strings")
    return list(dict.fromkeys(value))


def real(value: Any, name: str) -> float:
    """Return ``value`` as a finite number. Raises Invalid."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Invalid(f"{name} must be a number", got=repr(value)[:60])
    return number


# -- responses: a complete body, or a stream of unknown length

_BATCH = 64 * 1024  # bytes of lines to send together
_PIECE = 256 * 1024  # bytes of a file per read
_GZIP = 31  # zlib wbits: a window of 2**15 with a gzip header


@dataclass(frozen=True)
class Response:
    """A status and a complete body."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers


@dataclass(frozen=True)
class StreamingResponse:
    """A body in pieces. An empty piece sends nothing; the server then checks for a disconnect."""

    pieces: Generator[bytes, None, None]
    content_type: str = "application/json"
    done: Callable[[], None] | None = (
        None  # called once, when the stream has ended or was abandoned, even before its first piece
    )
    status: int = field(default=200, init=False)

    def close(self) -> None:
        """Release the resources of the stream."""
        self.pieces.close()
        if self.done is not None:
            self.done()


def encode(value: Any) -> bytes:
    """Encode as JSON; NaN and infinities become strings, as in protobuf's JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    except ValueError:
        return json.dumps(spell_nonfinite(value), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def failure(status: int, message: str) -> Response:
    """Return an error with its text where clients read it: ``message`` and ``error.error``."""
    error = {"code": status, "reason": HTTPStatus(status).phrase, "error": message}
    return Response(status, encode({"message": message, "error": error}))


def refuse_foreign(head: RequestHead, hosts: Collection[str]) -> Response | None:
    """Reject requests that a web page made a browser send (DNS rebinding, cross-site requests).

    Args:
        hosts: the accepted names of this server, with port.
    """
    if head.headers.get("host", "").lower() not in hosts:
        return failure(403, "the Host header does not match this server")
    origin = head.headers.get("origin")
    if origin is not None and origin.lower() not in {f"http://{host}" for host in hosts}:
        return failure(403, "requests from other origins are rejected")
    if head.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return failure(403, "requests from other sites are rejected")
    return None


def lines(
    values: Iterable[Mapping[str, Any] | None], *, follow: bool, done: Callable[[], None] | None = None
) -> StreamingResponse:
    """Stream newline-delimited JSON, one ``{"result": value}`` per line.

    With ``follow``, every line is sent separately, and None becomes an empty piece.
    """
    encoded = (b"" if value is None else encode({"result": value}) + b"\n" for value in values)
    return StreamingResponse(encoded if follow else _batched(encoded), done=done)


def listing(name: str, items: Iterable[Any], **more: Any) -> StreamingResponse:
    """Stream a JSON object in which field ``name`` is a list of any length."""

    def pieces() -> Iterator[bytes]:
        yield encode({**more, name: []})[:-2]
        for at, item in enumerate(items):
            yield (b"," if at else b"") + encode(item)
        yield b"]}"

    return StreamingResponse(_batched(pieces()))


def packed(tgz: bytes) -> StreamingResponse:
    """Stream a context directory in the format that clients unpack: ``b64Tgz``."""
    step = 3 * _BATCH  # a multiple of 3, so that there is no padding in between
    pieces = (base64.b64encode(tgz[at : at + step]) for at in range(0, len(tgz), step))
    return StreamingResponse(piece for part in ((b'{"b64Tgz":"',), pieces, (b'"}',)) for piece in part)


def _batched(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _BATCH:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)


def pack(directory: Path) -> Generator[bytes, None, None]:
    """Stream the regular files below ``directory`` as a .tar.gz. Raises OSError if one shrinks."""
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
            data = stream.read(min(_PIECE, left))
            if not data:
                raise OSError(f"{name} was truncated while it was being read")
            left -= len(data)
            yield data
    yield bytes(-info.size % tarfile.BLOCKSIZE)


def fields(record: object, *names: str) -> Dict:
    """Return attributes of a record under the camel-case names of Determined's bindings."""
    return {_camel(name): getattr(record, name) for name in names}


@cache
def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def when(seconds: float | None, timespec: str = "milliseconds") -> str | None:
    """Return a time as RFC 3339 in UTC; None if there is no such time yet."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


# -- the declaration of a route

Action = Callable[[Request], Response | StreamingResponse | Dict | None]
"""Answers a request. A dict is the JSON body of a response; None is an empty response."""

SMALL_BODY = 8 * 1024 * 1024  # bytes


class AuthLevel(Enum):
    """The tokens that a route accepts."""

    PUBLIC = "public"  # no token needed
    USER = "user"
    TASK = "task"
    BOTH = "both"


@dataclass(frozen=True)
class Route:
    """A method and a path with parts ``{name}`` or ``{name:int}``. ``limit``: bytes of body."""

    method: str
    path: str
    action: Action
    level: AuthLevel = AuthLevel.USER
    limit: int = SMALL_BODY
