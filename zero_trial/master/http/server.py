"""The HTTP/1.1 server: a listening socket (usually on loopback), a bounded number of connections,
one thread each.

Requests are read off the socket with limits on their size and duration, strictly on purpose (RFC
9112): one Content-Length or one chunked Transfer-Encoding, no folded headers, nothing that two
readers could understand in two ways. docs/decisions/0022 gives the reason why the reader is not a
library's.

A connection that waits (a long poll, followed logs, an idle keep-alive) costs a thread that sleeps.
When all connections are taken, the one whose client has kept the server waiting longest (for a
request, for a body, or until it takes an answer) is closed for the new one, so a client that opens
connections and sends or reads nothing locks no other client out. Only if the server works for every
connection, a new one gets 503, which Determined's clients try again.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import TypeVar

from zero_trial.errors import ZeroTrialError
from zero_trial.master.http.messages import (
    BadRequest,
    Gone,
    RequestHead,
    Response,
    StreamingResponse,
    failure,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
ReadBody = Callable[[int], "bytes | bytearray"]
Handler = Callable[[RequestHead, ReadBody], "Response | StreamingResponse"]
_MAX_HEAD = 32 * 1024  # bytes of request line and headers
_SLOWEST = 256 * 1024  # bytes a second below which a body is taken for an attack
_PIECE = 256 * 1024  # bytes asked of the socket or handed to it at once
LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 512
_FULL_BODY = b'{"message":"too many connections"}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)
_HEX = frozenset(b"0123456789abcdefABCDEF")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Timeouts:
    """Limits how long a connection waits for its client, in seconds."""

    idle: float = 120.0  # for the next request of a connection that is kept
    first: float = 10.0  # for the first byte of the first request
    head: float = 10.0  # for the rest of a request's headers
    # for the client to take a piece of an answer: followed logs may be read in a pager
    send: float = 300.0
    linger: float = 2.0  # for the rest of a body that was refused


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
        if _CONTROL.search(value):
            raise BadRequest(400, f"a control character in the header {name}")
        headers[name] = value.strip(" \t")
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
    """Reads requests off one socket, each read with the time that is left until a deadline.

    Attributes:
        heard: when something came, at first when it was made.
        body_taken: whether nothing is left of the newest request's body.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.heard = time.monotonic()
        self.body_taken = False

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
            self._receive(time.monotonic() + idle, _MAX_HEAD)
        block = self._until(b"\r\n\r\n", _MAX_HEAD, time.monotonic() + seconds, 431)
        head = parse_head(block.lstrip(b"\r\n"))
        self.body_taken = head.length == 0
        return head

    def body(self, head: RequestHead, limit: int) -> bytes | bytearray:
        """Read the body, at most ``limit`` bytes; empty if it was read. Raises BadRequest (413,
        408) and Gone.
        """
        if self.body_taken:
            return b""
        if head.headers.get("expect", "").lower() == "100-continue" and (head.length or 0) <= limit:
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.length is None:
            body = self._chunked(limit)
        elif head.length > limit:
            raise BadRequest(413, f"the body has {head.length} bytes, at most {limit} are accepted here")
        else:
            body = self._exactly(head.length, time.monotonic() + 10 + head.length / _SLOWEST)
        self.body_taken = True
        return body

    def _chunked(self, limit: int) -> bytearray:
        body = bytearray()
        deadline = time.monotonic() + 10 + limit / _SLOWEST
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
            self._receive(deadline, min(_PIECE, count - len(self._buffer)))
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
        self.heard = time.monotonic()
        self._buffer += data


class Connection:
    """Serves one socket with ``handler`` until it is closed."""

    def __init__(self, sock: socket.socket, handler: Handler, timeouts: Timeouts) -> None:
        self._sock = sock
        self._handler = handler
        self._timeouts = timeouts
        self._reader = Reader(sock)
        self._since = self._reader.heard  # when the last wait for the client began, monotonic
        self.waits = True  # for its client: for a request, for a body, or until it takes an answer

    @property
    def waits_since(self) -> float:
        """Return since when the client has done nothing that the server waits for, monotonic. The
        time that the server itself took before is not the client's."""
        return max(self._reader.heard, self._since)

    def serve(self) -> None:
        """Answer requests until the connection ends; never raises."""
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            idle = self._timeouts.first
            while self._one(idle):
                idle = self._timeouts.idle
        except (Gone, OSError):
            pass
        finally:
            self.end()

    def end(self) -> None:
        """Close the socket and wake the thread that reads or writes it. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()

    def _one(self, idle: float) -> bool:
        """Answer one request; return whether another may follow."""
        try:
            head = self._reader.head(idle=idle, seconds=self._timeouts.head)
        except BadRequest as error:
            self._send(failure(error.status, str(error), close=True))
            self._linger()
            return False
        self.waits = False
        try:
            answer = self._handler(head, lambda limit: self._awaited(lambda: self._reader.body(head, limit)))
        except BadRequest as error:
            answer = failure(error.status, str(error), close=True)
        keep = head.keep_alive and self._reader.body_taken and not (isinstance(answer, Response) and answer.close)
        log.debug("%s %s -> %d", head.method, head.path, answer.status)
        if isinstance(answer, StreamingResponse):
            with contextlib.closing(answer):
                keep = self._stream(answer, head.method) and keep
        else:
            self._send(answer, keep=keep, method=head.method)
        if not self._reader.body_taken:
            self._linger()
        self._wait()
        return keep

    def _send(self, answer: Response, *, keep: bool = False, method: str = "") -> None:
        end = "\r\n" if keep else "Connection: close\r\n\r\n"
        more = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nX-Content-Type-Options: nosniff\r\n{more}{end}"
        ).encode()
        if method == "HEAD":
            self._write(head)
            return
        if len(answer.body) <= _PIECE:
            self._write(head + answer.body)
            return
        self._write(head)
        self._write(answer.body)

    def _stream(self, answer: StreamingResponse, method: str) -> bool:
        """Send pieces as they come, in HTTP/1.1 chunks.

        Returns False if the stream broke off: the missing last chunk is the client's sign of it.
        """
        self._write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {answer.content_type}\r\nTransfer-Encoding: chunked\r\n"
            "X-Content-Type-Options: nosniff\r\n\r\n".encode()
        )
        if method == "HEAD":
            return True
        try:
            for piece in answer.pieces:
                if piece:
                    self._write(b"%x\r\n%b\r\n" % (len(piece), piece))
                elif self._hung_up():
                    return False
        except Gone:
            raise
        except Exception:
            log.exception("a stream broke off")
            return False
        self._write(b"0\r\n\r\n")
        return True

    def _write(self, data: bytes) -> None:
        """Send in pieces: each piece that the client reads restarts the timeout."""
        self._sock.settimeout(self._timeouts.send)
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            try:
                self._awaited(lambda piece=piece: self._sock.sendall(piece))  # type: ignore[misc]
            except OSError as error:
                raise Gone(str(error)) from None

    def _awaited(self, act: Callable[[], T]) -> T:
        """Do what takes as long as the client likes."""
        self._wait()
        try:
            return act()
        finally:
            self.waits = False

    def _wait(self) -> None:
        """From now on the client is waited for."""
        self._since = time.monotonic()
        self.waits = True

    def _hung_up(self) -> bool:
        try:
            self._sock.settimeout(0)
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _linger(self) -> None:
        """Read what still comes, for a moment, or a reset would discard the answer."""
        self._wait()
        deadline = time.monotonic() + self._timeouts.linger
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left)
                if not self._sock.recv(_PIECE):
                    return


class HttpServer:
    """Listens on a socket and serves its connections, a thread each.

    It listens from its construction and answers after ``start``; ``with`` closes it. ``port`` 0
    takes a free one. Raises ZeroTrialError if the port is taken.
    """

    def __init__(
        self, *, host: str = LOOPBACK, port: int = 0, limit: int = MAX_CONNECTIONS, timeouts: Timeouts | None = None
    ) -> None:
        self._limit = limit
        self._timeouts = timeouts or Timeouts()
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self.host = host
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self, handler: Handler) -> None:
        """Answer with ``handler`` in threads of their own; returns at once."""
        self._thread = threading.Thread(target=self._accept, args=(handler,), name="http-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.end()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, handler: Handler) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closing.is_set():
                    return
                log.exception("a connection could not be accepted")
                self._closing.wait(0.05)  # out of descriptors, most likely: others will close
                continue
            try:
                self._admit(sock, handler)
            except Exception:
                # no thread could be started, most likely: this one is lost, the next may not be
                log.exception("a connection could not be served")
                sock.close()

    def _admit(self, sock: socket.socket, handler: Handler) -> None:
        connection = Connection(sock, handler, self._timeouts)
        with self._lock:
            full = len(self._open) >= self._limit
            waiting = [other for other in self._open if other.waits] if full else []
            victim = min(waiting, key=lambda other: other.waits_since, default=None)
            if victim is not None:
                self._open.remove(victim)
            if not full or victim is not None:
                self._open.add(connection)
        if victim is not None:
            victim.end()
        elif full:
            log.warning("%d connections are all busy: a new one was refused", self._limit)
            with contextlib.suppress(OSError):
                sock.settimeout(1)
                sock.sendall(_FULL)
            sock.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="http", daemon=True).start()
        except BaseException:
            with self._lock:
                self._open.discard(connection)
            raise

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve()
        except Exception:
            log.exception("a connection ended in a fault")
        finally:
            with self._lock:
                self._open.discard(connection)


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise ZeroTrialError(
            f"cannot listen: {error.strerror}",
            where=f"{host}:{port}",
            fix="Choose another port, or 0 for any that is free.",
        ) from None
    return sock
