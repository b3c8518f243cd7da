"""The listening socket: loopback only, a bounded number of connections, one thread each.

A connection that waits (a long poll, followed logs, an idle keep-alive) costs a thread that sleeps. When all ``limit`` connections are taken, the one
that has waited longest for a request makes room, so a client that opens connections and says nothing, or says it slowly, locks nobody out. Only when
every connection is being answered is a new one told 503, which Determined's clients try again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from types import TracebackType

from zero_trial.errors import ZeroTrialError
from zero_trial.master.api.connection import Connection, Handler, Patience

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 512

_FULL_BODY = b'{"message":"too many connections"}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class HttpServer:
    """Listens from the moment that it is made; answers once ``start`` was called; ``with`` does both and closes at the end.

    ``port`` 0 takes a free one. Raises ZeroTrialError if the port is taken.
    """

    def __init__(self, *, port: int = 0, limit: int = MAX_CONNECTIONS, patience: Patience | None = None) -> None:
        self._limit = limit
        self._patience = patience or Patience()
        self._handler: Handler | None = None
        self._lock = threading.Lock()
        self._open: dict[Connection, None] = {}  # oldest first
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._socket = _listen(port)
        self.port: int = self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self, handler: Handler) -> None:
        """Answer with ``handler`` in threads of their own; returns at once."""
        self._handler = handler
        self._thread = threading.Thread(target=self._accept, name="http-accept", daemon=True)
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

    def _accept(self) -> None:
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
                self._admit(sock)
            except Exception:  # no thread could be started, most likely: this one is lost, the next may not be
                log.exception("a connection could not be served")
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._require_handler(), self._patience)
        with self._lock:
            full = len(self._open) >= self._limit
            victim = next((other for other in self._open if not other.busy), None) if full else None
            if victim is not None:
                del self._open[victim]
            if not full or victim is not None:
                self._open[connection] = None
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
                self._open.pop(connection, None)
            raise

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve()
        except Exception:
            log.exception("a connection ended in a fault")
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def _require_handler(self) -> Handler:
        if self._handler is None:
            raise ZeroTrialError("the server was not started")
        return self._handler


def _listen(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOOPBACK, port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise ZeroTrialError(
            f"cannot listen: {error.strerror}",
            where=f"{LOOPBACK}:{port}",
            fix="Choose another port, or 0 for any that is free.",
        ) from None
    return sock
