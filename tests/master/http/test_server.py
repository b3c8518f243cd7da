"""The server: its socket, bodies, streams, and clients that send slowly, nonsense, or nothing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.master.world import World
from zero_trial.errors import ZeroTrialError
from zero_trial.master.http import listen
from zero_trial.master.http.messages import RequestHead, Response, StreamingResponse, failure
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


def test_requests_are_answered_in_turn_on_one_connection() -> None:
    text = exchange(
        echo, b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /b HTTP/1.1\r\nConnection: close\r\n\r\n"
    )
    assert text.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert text.index(b"\r\n\r\nabc") < text.index(b"\r\n\r\nnothing")


def test_a_chunked_body_is_one_whole() -> None:
    chunks = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    text = exchange(echo, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
    assert text.endswith(b"\r\n\r\nabcde")


def test_expect_100_continue_is_answered() -> None:
    with serving() as server, connect(server) as sock:
        sock.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"abc")
        assert read_all(sock).endswith(b"abc")


def test_a_body_that_is_too_long_for_the_route_is_refused() -> None:
    head = b"POST /a HTTP/1.1\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n"
    assert exchange(echo, head + b"x" * 1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_no_handler_reads_is_not_the_next_request() -> None:
    smuggled = b"GET /smuggled HTTP/1.1\r\n\r\n"
    head = b"POST /a HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    text = exchange(lambda head, read_body: failure(401, "who are you"), head + smuggled)
    assert text.count(b"HTTP/1.1 ") == 1


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


def test_a_large_answer_arrives_whole() -> None:
    body = bytes(range(256)) * 4096 * 20
    text = exchange(lambda head, read_body: Response(200, body), b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert text.endswith(body)


def test_whatever_is_sent_the_server_lives(world: World) -> None:
    """Noise, halves of requests, and requests with noise in them, on connections that are dropped
    at once."""
    noise = random.Random(7)
    with listen(world) as server:
        good = f"GET /info HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()
        for _ in range(100):
            text = bytearray(good)
            for _ in range(noise.randrange(1, 6)):
                text[noise.randrange(len(text))] = noise.randrange(256)
            kind = noise.randrange(3)
            sent = [noise.randbytes(noise.randrange(1, 300)), good[: noise.randrange(len(good))], bytes(text)][kind]
            with connect(server) as sock:
                sock.sendall(sent)
        with connect(server) as sock:
            sock.sendall(good)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_many_clients_at_once_are_all_answered(world: World) -> None:
    answers: list[bytes] = []
    with listen(world) as server:
        request = f"GET /info HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()

        def ask() -> None:
            for _ in range(10):
                with connect(server) as sock:
                    sock.sendall(request)
                    answers.append(sock.recv(65536)[:15])

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert answers == [b"HTTP/1.1 200 OK"] * 200
