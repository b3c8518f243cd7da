"""The server: its socket, bodies, streams, and clients that send slowly, nonsense, or nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from zero_trial.errors import ZeroTrialError
from zero_trial.master.http.messages import RequestHead, Response, StreamingResponse
from zero_trial.master.http.server import HttpServer, ReadBody


def echo(head: RequestHead, read_body: ReadBody) -> Response:
    return Response(200, read_body(100) or b"nothing")


@contextlib.contextmanager
def serving(handler: Any = echo, threads: int = 4) -> Iterator[HttpServer]:
    with HttpServer(threads=threads) as server:
        server.start(handler)
        yield server


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


def exchange(handler: Any, sent: bytes) -> bytes:
    """Return all that the server sends until it closes the connection."""
    with serving(handler) as server, connect(server) as sock:
        sock.sendall(sent)
        return read_all(sock)


def test_it_answers_on_loopback_at_a_free_port_and_nowhere_else() -> None:
    with serving() as server, connect(server) as sock:
        assert server.url == f"http://127.0.0.1:{server.port}"
        sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", server.port), timeout=2).close()
        with pytest.raises(ZeroTrialError, match=f"127.0.0.1:{server.port}: cannot listen"):
            HttpServer(port=server.port)
    with HttpServer(port=server.port) as again:
        assert again.port == server.port


def test_silent_and_slow_clients_lock_no_other_out() -> None:
    pieces = [b"", b"GET / HTTP/1.1\r\nX-Slow: ", b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nx"]
    with serving(threads=2) as server, contextlib.ExitStack() as stack:
        for index in range(300):
            stack.enter_context(connect(server)).sendall(pieces[index % 3])
        with connect(server) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 200 OK")


def test_closing_ends_every_connection() -> None:
    with serving() as server:
        sock = connect(server)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(1)
    assert read_all(sock).endswith(b"nothing")  # and then the end of the stream
    sock.close()


def test_a_stream_goes_out_in_chunks() -> None:
    def stream(head: RequestHead, read_body: ReadBody) -> StreamingResponse:
        return StreamingResponse((piece for piece in [b"one\n", b"", b"two\n"]), content_type="text/plain")

    text = exchange(stream, b"GET /a HTTP/1.1\r\n\r\n")
    assert text.endswith(b"\r\n\r\n4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\n")


def test_headers_of_a_stream_come_before_its_first_piece() -> None:
    release = threading.Event()

    def pieces() -> Any:
        assert release.wait(60)
        yield b"late"

    with serving(lambda head, read_body: StreamingResponse(pieces())) as server, connect(server) as sock:
        sock.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")
        release.set()


def test_a_stream_that_breaks_has_no_last_chunk(caplog: pytest.LogCaptureFixture) -> None:
    def pieces() -> Any:
        yield b"one\n"
        raise ValueError("the disk is gone")

    text = exchange(lambda head, read_body: StreamingResponse(pieces()), b"GET /a HTTP/1.1\r\n\r\n")
    assert b"4\r\none\n\r\n" in text
    assert not text.endswith(b"0\r\n\r\n")
    assert "the disk is gone" in caplog.text


def test_a_stream_whose_reader_has_gone_ends_and_releases_what_it_holds() -> None:
    begun, done = threading.Event(), threading.Event()

    def pieces() -> Any:
        while True:
            begun.set()
            yield b""

    with serving(lambda head, read_body: StreamingResponse(pieces(), done=done.set)) as server:
        with connect(server) as sock:
            sock.sendall(b"GET /a HTTP/1.1\r\n\r\n")
            assert begun.wait(60)
        assert done.wait(60)
