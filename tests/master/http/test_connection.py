"""One connection: requests in turn, bodies that nobody wanted, streams that nobody reads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zero_trial.master.http.request import RequestHead
from zero_trial.master.http.response import Response, StreamingResponse, failure
from zero_trial.master.http.server import Connection, ReadBody, Timeouts

Start = Callable[..., socket.socket]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serve one end of a socket pair with a handler, and return the other end."""
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def begin(handler: Any, **patience: float) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname(), timeout=10)
            server, _ = listening.accept()
        connection = Connection(server, handler, Timeouts(**{"linger": 0.2, **patience}))
        thread = threading.Thread(target=connection.serve)
        thread.start()
        sockets.append(client)
        threads.append(thread)
        return client

    yield begin
    for each in sockets:
        each.close()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def read_all(client: socket.socket) -> bytes:
    parts = []
    while data := client.recv(65536):
        parts.append(data)
    return b"".join(parts)


def echo(head: RequestHead, read_body: ReadBody) -> Response:
    return Response(200, bytes(read_body(100)) or b"nothing")


def test_requests_are_answered_in_turn_on_one_connection(start: Start) -> None:
    client = start(echo)
    client.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /b HTTP/1.1\r\nConnection: close\r\n\r\n")
    text = read_all(client)
    assert text.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert text.index(b"\r\n\r\nabc") < text.index(b"nothing")
    assert text.endswith(b"Connection: close\r\n\r\nnothing")


def test_a_body_that_is_too_long_is_refused_and_the_answer_arrives(start: Start) -> None:
    def handler(head: RequestHead, read_body: ReadBody) -> Response:
        read_body(100)
        return Response()

    client = start(handler)
    client.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 100_000)
    client.shutdown(socket.SHUT_WR)
    assert read_all(client).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_no_one_read_ends_the_connection(start: Start) -> None:
    """Otherwise what was sent as a body would be read as the next request."""
    client = start(lambda head, read_body: failure(401, "who are you"))
    client.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 30\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n")
    client.shutdown(socket.SHUT_WR)
    assert read_all(client).count(b"HTTP/1.1 ") == 1


def test_who_asks_before_sending_a_body_is_told_to_go_on(start: Start) -> None:
    client = start(echo)
    client.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
    assert client.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b"abc")
    assert read_all(client).endswith(b"abc")


def test_a_bad_request_gets_an_answer_and_an_end(start: Start) -> None:
    client = start(echo)
    client.sendall(b"nonsense\r\n\r\n")
    client.shutdown(socket.SHUT_WR)
    assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_a_slow_head_is_given_up(start: Start) -> None:
    client = start(echo, head=0.1)
    client.sendall(b"GET /a HT")
    assert read_all(client).startswith(b"HTTP/1.1 408 ")


def test_a_silent_connection_is_given_up(start: Start) -> None:
    assert read_all(start(echo, first=0.05)) == b""


def test_a_stream_goes_out_in_chunks_and_the_connection_is_kept(start: Start) -> None:
    pieces = [b"one\n", b"", b"two\n"]
    client = start(lambda head, read_body: StreamingResponse((piece for piece in pieces), content_type="text/plain"))
    client.sendall(b"GET /a HTTP/1.1\r\n\r\nGET /a HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert read_all(client).count(b"4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\n") == 2


def test_a_stream_that_breaks_has_no_last_chunk(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    def pieces() -> Any:
        yield b"one\n"
        raise ValueError("the disk is gone")

    client = start(lambda head, read_body: StreamingResponse(pieces()))
    client.sendall(b"GET /a HTTP/1.1\r\n\r\n")
    text = read_all(client)
    assert b"4\r\none\n\r\n" in text
    assert not text.endswith(b"0\r\n\r\n")
    assert "the disk is gone" in caplog.text


def test_a_stream_whose_reader_has_gone_ends_and_lets_go(start: Start) -> None:
    begun, done = threading.Event(), threading.Event()

    def pieces() -> Any:
        while True:
            begun.set()
            yield b""

    client = start(lambda head, read_body: StreamingResponse(pieces(), done=done.set))
    client.sendall(b"GET /a HTTP/1.1\r\n\r\n")
    assert begun.wait(10)
    client.close()
    assert done.wait(10)


def test_a_large_answer_arrives_whole(start: Start) -> None:
    body = bytes(range(256)) * 4096 * 3
    client = start(lambda head, read_body: Response(200, body))
    client.sendall(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert read_all(client).endswith(body)
