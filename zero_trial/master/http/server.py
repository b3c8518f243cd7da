"""The HTTP/1.1 server: one waitress thread reads requests and writes responses, and a thread pool
calls the handler (docs/decisions/http-of-the-master.md).

A request is passed to the pool once waitress has received all of it (large bodies go to temporary
files), so a slow client occupies a socket but no thread. A long poll or a followed log occupies a
sleeping thread.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from types import TracebackType
from typing import Any

from waitress import wasyncore
from waitress.server import create_server

from zero_trial.errors import ZeroTrialError
from zero_trial.master.http.messages import BadRequest, RequestHead, Response, StreamingResponse, failure

log = logging.getLogger(__name__)
ReadBody = Callable[[int], bytes]
Handler = Callable[[RequestHead, ReadBody], "Response | StreamingResponse"]
LOOPBACK = "127.0.0.1"
THREADS = 256
_LIMITS: Mapping[str, Any] = {
    "max_request_header_size": 32 * 1024,  # bytes
    "max_request_body_size": 128 * 1024 * 1024 + 1,  # bytes; each route has its own, lower limit
    "connection_limit": 900,  # usually there are 1,024 file descriptors; further connections wait in the kernel
    "recv_bytes": 256 * 1024,
    "channel_timeout": 60,  # seconds without a byte, between requests or within one
    "cleanup_interval": 10,
}


class HttpServer:
    """Listens on a socket and answers with a handler, which many threads call concurrently.

    The socket listens from construction on and answers after ``start``; ``with`` closes it.
    ``port`` 0 selects a free port. Raises ZeroTrialError if the port is in use.
    """

    def __init__(self, *, host: str = LOOPBACK, port: int = 0, threads: int = THREADS) -> None:
        self.host, self._threads = host, threads
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._closing = threading.Event()
        self._waking = threading.Lock()  # held while a thread writes to the trigger or closes it
        self._channels: dict[int, Any] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self, handler: Handler) -> None:
        """Start to answer with ``handler`` in background threads; return immediately."""
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # waiting for a thread is normal, so do not warn
        self._server = create_server(
            _application(handler),
            map=self._channels,
            sockets=[self._socket],
            threads=self._threads,
            channel_request_lookahead=1,  # detects clients that disconnect during a response
            clear_untrusted_proxy_headers=False,  # nothing reads these headers
            ident=None,
            **_LIMITS,
        )
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            wasyncore.loop(timeout=1.0, map=self._channels, use_poll=True, count=1)
        self._server.task_dispatcher.set_thread_count(0)  # busy threads are daemons: do not wait for them
        for channel in list(self._server.active_channels.values()):
            channel.handle_close()
        with self._waking:
            wasyncore.close_all(self._channels)

    def close(self) -> None:
        """Stop listening and end every connection."""
        if self._thread is not None:
            with self._waking:
                self._closing.set()
                self._server.trigger.pull_trigger()
            self._thread.join(timeout=5)
            self._thread = None
        self._socket.close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _application(handler: Handler) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    """Return a WSGI application (PEP 3333) that calls ``handler``."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            head = _head_of(environ)
            found = handler(head, lambda limit: _body(environ, head.length, limit))
        except BadRequest as error:
            found = failure(error.status, str(error))
        if isinstance(found, StreamingResponse) and environ["REQUEST_METHOD"] == "HEAD":
            found.close()
            found = failure(405, "this is a stream: use GET")
        headers = [("Content-Type", found.content_type), ("X-Content-Type-Options", "nosniff")]
        status = f"{found.status} {HTTPStatus(found.status).phrase}"
        if isinstance(found, StreamingResponse):
            try:
                start_response(status, headers)(b"")  # sends the headers now: the first piece may take long
            except BaseException:
                found.close()
                raise
            return _pieces(found, environ["waitress.client_disconnected"])
        start_response(status, [*headers, ("Content-Length", str(len(found.body))), *found.headers.items()])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [found.body]

    return answer


def _head_of(environ: Mapping[str, Any]) -> RequestHead:
    """Return the request line and headers. Raises BadRequest."""
    path, _, query = environ["REQUEST_URI"].partition("#")[0].partition("?")
    if not path.startswith("/") or not (path.isascii() and path.isprintable()):
        raise BadRequest(400, "the request target must be a path")
    headers = {key[5:].lower().replace("_", "-"): value for key, value in environ.items() if key.startswith("HTTP_")}
    return RequestHead(environ["REQUEST_METHOD"], path, query, headers, int(environ.get("CONTENT_LENGTH") or 0))


def _body(environ: Mapping[str, Any], length: int, limit: int) -> bytes:
    """Return the body of at most ``limit`` bytes. Raises BadRequest."""
    if length > limit:
        raise BadRequest(413, f"the body has {length} bytes; at most {limit} are accepted here")
    body: bytes = environ["wsgi.input"].read(length)
    return body


def _pieces(answer: StreamingResponse, gone: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the pieces of a stream until the client disconnects. If an error interrupts the stream,
    the final chunk is missing, so that the client can detect it."""
    with closing(answer):
        try:
            for piece in answer.pieces:
                if piece:
                    yield piece
                elif gone():
                    return
        except Exception:
            log.exception("a stream was interrupted")
            raise


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
            fix="Choose another port, or 0 for any free port.",
        ) from None
    return sock
