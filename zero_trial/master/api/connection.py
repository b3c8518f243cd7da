"""One client's connection: request after request until somebody hangs up."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from zero_trial.master.api.answer import REASONS, Answer, Stream, failure
from zero_trial.master.api.request import BadRequest, Gone, Head, Reader

log = logging.getLogger(__name__)

ReadBody = Callable[[int], "bytes | bytearray"]
Handler = Callable[[Head, ReadBody], "Answer | Stream"]

PIECE = 256 * 1024  # bytes handed to the socket at once


@dataclass(frozen=True)
class Patience:
    """How long a connection waits for its other side, in seconds."""

    idle: float = 120.0  # for the next request of a connection that is kept
    first: float = 10.0  # for the first byte of the first request
    head: float = 10.0  # for the rest of a request's headers
    send: float = 300.0  # for the other side to take a piece of an answer: somebody may read followed logs in a pager
    linger: float = 2.0  # for the rest of a body that was refused


class Connection:
    """Serves one socket with ``handler`` until it is closed. ``busy`` is read by the server when it looks for connections to end."""

    def __init__(self, sock: socket.socket, handler: Handler, patience: Patience) -> None:
        self._sock = sock
        self._handler = handler
        self._patience = patience
        self._reader = Reader(sock)
        self.busy = False  # a request has come whole and is being answered

    def serve(self) -> None:
        """Answer requests until the connection ends; never raises."""
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            idle = self._patience.first
            while self._one(idle):
                idle = self._patience.idle
        except (Gone, OSError):
            pass
        finally:
            self.end()

    def end(self) -> None:
        """Close the socket; whoever reads or writes it is woken. Any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()

    def _one(self, idle: float) -> bool:
        """One request; True if another may follow."""
        try:
            head = self._reader.head(idle=idle, seconds=self._patience.head)
        except BadRequest as error:
            self._send(failure(error.status, str(error), close=True))
            self._linger()
            return False
        self.busy = True
        body = _Body(self._reader, self._sock, head)
        try:
            answer = self._handler(head, body.read)
        except BadRequest as error:
            answer = failure(error.status, str(error), close=True)
        keep = head.keep_alive and body.taken and not (isinstance(answer, Answer) and answer.close)
        log.debug("%s %s -> %d", head.method, head.path, answer.status)
        if isinstance(answer, Stream):
            with contextlib.closing(answer):
                keep = self._stream(answer) and keep
        else:
            self._send(answer, keep=keep)
        self.busy = False
        if not body.taken:
            self._linger()
        return keep

    def _send(self, answer: Answer, *, keep: bool = False) -> None:
        end = "\r\n" if keep else "Connection: close\r\n\r\n"
        head = (
            f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Status')}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nX-Content-Type-Options: nosniff\r\n{end}"
        ).encode()
        if len(answer.body) <= PIECE:
            self._write(head + answer.body)
            return
        self._write(head)
        view = memoryview(answer.body)
        for start in range(0, len(view), PIECE):
            self._write(view[start : start + PIECE])

    def _stream(self, answer: Stream) -> bool:
        """Send pieces as they come, in HTTP/1.1 chunks; False if the stream broke off (the missing last chunk tells the client)."""
        self._write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {answer.content_type}\r\nTransfer-Encoding: chunked\r\n"
            "X-Content-Type-Options: nosniff\r\n\r\n".encode()
        )
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

    def _write(self, data: bytes | memoryview) -> None:
        self._sock.settimeout(self._patience.send)
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise Gone(str(error)) from None

    def _hung_up(self) -> bool:
        self._sock.settimeout(0)
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _linger(self) -> None:
        """Take what the client still sends, for a moment, so that the answer is not lost to a connection reset."""
        deadline = time.monotonic() + self._patience.linger
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left)
                if not self._sock.recv(PIECE):
                    return


class _Body:
    """Reads a request's body when the handler asks for it, and remembers whether all of it was taken."""

    def __init__(self, reader: Reader, sock: socket.socket, head: Head) -> None:
        self._reader = reader
        self._sock = sock
        self._head = head
        self.taken = head.length == 0

    def read(self, limit: int) -> bytes | bytearray:
        if self.taken:
            return b""
        if self._head.headers.get("expect", "").lower() == "100-continue" and (self._head.length or 0) <= limit:
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._reader.body(self._head, limit)
        self.taken = True
        return body
