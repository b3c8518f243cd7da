"""The HTTP/1.1 server: waitress reads requests and writes responses in one thread, and a pool of
threads calls the handler (docs/decisions/http-of-the-master.md).

A request reaches a thread of the pool when waitress has received all of it, large bodies in
temporary files: a client that sends slowly costs a socket and no thread. A long poll and a followed
log cost a thread that sleeps.
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
    "max_request_body_size": 128 * 1024 * 1024 + 1,  # bytes; a route accepts at most its own limit
    "connection_limit": 900,  # 1,024 file descriptors are usual; beyond it, connections wait in the kernel
    "recv_bytes": 256 * 1024,
    "channel_timeout": 60,  # seconds without a byte between two requests, or in the middle of one
    "cleanup_interval": 10,
}


class HttpServer:
    """Listens on a socket and answers with a handler, which many threads call at once.

    It listens from its construction and answers after ``start``; ``with`` closes it. ``port`` 0
    takes a free one. Raises ZeroTrialError if the port is taken.
    """

    def __init__(self, *, host: str = LOOPBACK, port: int = 0, threads: int = THREADS) -> None:
        self.host, self._threads = host, threads
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._closing = threading.Event()
        self._waking = threading.Lock()  # held while a thread writes to the trigger, or closes it
        self._channels: dict[int, Any] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self, handler: Handler) -> None:
        """Answer with ``handler`` in threads of their own; returns at once."""
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # requests may wait for a thread
        self._server = create_server(
            _application(handler),
            map=self._channels,
            sockets=[self._socket],
            threads=self._threads,
            channel_request_lookahead=1,  # notices clients that close while they are answered
            clear_untrusted_proxy_headers=False,  # nothing reads them
            ident=None,
            **_LIMITS,
        )
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            wasyncore.loop(timeout=1.0, map=self._channels, use_poll=True, count=1)
        self._server.task_dispatcher.set_thread_count(0)  # busy ones are daemons: nothing waits for them
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
    """Return a handler as a WSGI application (PEP 3333)."""

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
                start_response(status, headers)(b"")  # sends the headers: the first piece may take long
            except BaseException:
                found.close()
                raise
            return _pieces(found, environ["waitress.client_disconnected"])
        start_response(status, [*headers, ("Content-Length", str(len(found.body))), *found.headers.items()])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [found.body]

    return answer


def _head_of(environ: Mapping[str, Any]) -> RequestHead:
    """Return request line and headers. Raises BadRequest."""
    path, _, query = environ["REQUEST_URI"].partition("#")[0].partition("?")
    if not path.startswith("/") or not (path.isascii() and path.isprintable()):
        raise BadRequest(400, "the request target must be a path")
    headers = {key[5:].lower().replace("_", "-"): value for key, value in environ.items() if key.startswith("HTTP_")}
    return RequestHead(environ["REQUEST_METHOD"], path, query, headers, int(environ.get("CONTENT_LENGTH") or 0))


def _body(environ: Mapping[str, Any], length: int, limit: int) -> bytes:
    """Return the body, at most ``limit`` bytes. Raises BadRequest."""
    if length > limit:
        raise BadRequest(413, f"the body has {length} bytes; at most {limit} are accepted here")
    body: bytes = environ["wsgi.input"].read(length)
    return body


def _pieces(answer: StreamingResponse, gone: Callable[[], bool]) -> Iterator[bytes]:
    """Yield what is to be sent, until the client has gone. If it breaks off, the last chunk is
    missing, which is how the client notices."""
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
