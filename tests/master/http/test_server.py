"""The listening socket, its connections, and the server as one thing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.master.world import World
from zero_trial.errors import ZeroTrialError
from zero_trial.master.http import listen
from zero_trial.master.http.messages import RequestHead, Response, StreamingResponse, failure
from zero_trial.master.http.server import Connection, HttpServer, ReadBody, Timeouts


@contextlib.contextmanager
def serving(handler: object = lambda head, read_body: Response(), limit: int = 4) -> Iterator[HttpServer]:
    with HttpServer(limit=limit, timeouts=Timeouts(linger=0.1)) as server:
        server.start(handler)  # type: ignore[arg-type]
        yield server


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def get(sock: socket.socket) -> bytes:
    sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    parts = []
    while data := sock.recv(65536):
        parts.append(data)
    return b"".join(parts)


def ended(sock: socket.socket) -> bool:
    """Tell that the server has closed the connection, after what it had sent; if it has not,
    reading times out."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 20):
            pass
    return True


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the server's threads come to."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_answers_on_loopback_at_a_free_port() -> None:
    with serving() as server, connect(server) as sock:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert get(sock).startswith(b"HTTP/1.1 200 OK")


def test_other_addresses_of_this_machine_are_not_listened_to() -> None:
    with serving() as server, pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), timeout=2).close()


def test_a_port_that_is_taken_is_said() -> None:
    with serving() as server, pytest.raises(ZeroTrialError, match=f"127.0.0.1:{server.port}: cannot listen"):
        HttpServer(port=server.port)


def test_a_port_can_be_used_again_at_once() -> None:
    with serving() as server, connect(server) as sock:
        get(sock)
    with HttpServer(port=server.port) as again:
        assert again.port == server.port


def test_silent_and_slow_clients_lock_no_other_out() -> None:
    with serving(limit=4) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(12)]
        for sock in slow[::2]:
            with contextlib.suppress(OSError):
                sock.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        with connect(server) as sock:
            assert get(sock).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /read HTTP/1.1\r\nContent-Length: 10\r\n\r\n",
        b"POST /read HTTP/1.1\r\nContent-Length: 10\r\n\r\nx",
        b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\na\r\nx",
        b"GET /large HTTP/1.1\r\n\r\n",
    ],
    ids=["no body", "half a body", "half a chunk", "an answer that is not read"],
)
def test_neither_do_clients_that_send_no_body_or_read_no_answer(sent: bytes) -> None:
    entered = threading.Semaphore(0)

    def handler(head: RequestHead, read_body: ReadBody) -> Response:
        if head.path != "/":
            entered.release()
        if head.path == "/read":
            read_body(100)
        return Response(200, bytes(32 << 20) if head.path == "/large" else b"{}")

    with serving(handler, limit=3) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(3)]
        for sock in slow:
            sock.sendall(sent)
            assert entered.acquire(timeout=60)
        until(lambda: all(one.waits and time.monotonic() - one.waits_since > 0.1 for one in list(server._open)))
        names = {connection: connection._sock.getpeername() for connection in server._open}
        with connect(server) as sock:
            assert get(sock).startswith(b"HTTP/1.1 200 OK")
            (gone,) = names.keys() - server._open
        assert [ended(sock) for sock in slow if sock.getsockname() == names[gone]] == [True]


@pytest.mark.parametrize(
    ("sent", "rest", "answer"),
    [
        (b"POST /read HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n", b"abc", b"abc"),
        (b"GET /stream HTTP/1.1\r\n", b"", bytes(32 << 20) + b"\r\n0\r\n\r\n"),
        (b"GET /large HTTP/1.1\r\n", b"", bytes(32 << 20)),
    ],
    ids=["a body", "a stream", "a large answer"],
)
def test_the_time_that_the_server_took_is_not_the_clients(sent: bytes, rest: bytes, answer: bytes) -> None:
    """A long poll that is answered at last, or a followed log with a new line, has to go after one
    that has been silent for longer than the server has waited for it."""
    entered, release = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        entered.set()
        assert release.wait(60)
        yield bytes(32 << 20)

    def handler(head: RequestHead, read_body: ReadBody) -> Response | StreamingResponse:
        if head.path == "/":
            return Response()
        if head.path == "/stream":
            return StreamingResponse(pieces())
        entered.set()
        assert release.wait(60)
        return Response(200, bytes(read_body(100)) if head.path == "/read" else bytes(32 << 20))

    with serving(handler, limit=3) as server, contextlib.ExitStack() as stack:
        served = stack.enter_context(connect(server))
        served.sendall(sent + b"Connection: close\r\n\r\n")
        assert entered.wait(60)
        if b"/stream" in sent:  # its headers come before its first piece
            assert served.recv(65536).endswith(b"\r\n\r\n")
        silent, other = (stack.enter_context(connect(server)) for _ in range(2))
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert other.recv(65536).startswith(b"HTTP/1.1 200 OK")  # so the silent one was accepted before
        release.set()
        assert served.recv(1)  # from now on the server waits for it
        with connect(server) as new:
            assert get(new).startswith(b"HTTP/1.1 200 OK")
        assert ended(silent)
        served.sendall(rest)
        assert read_all(served).endswith(answer)


def test_the_client_that_keeps_the_server_waiting_longest_has_to_go() -> None:
    """Not the one that opened its connection first, and sends its body now."""
    with serving(echo, limit=2) as server, connect(server) as first, connect(server) as second:
        for sock in (first, second):
            sock.sendall(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
            assert sock.recv(65536).endswith(b"abc")
        before = time.monotonic()
        second.sendall(b"POST / HTTP/1.1\r\n")  # and not the rest
        until(lambda: any(connection._reader.heard > before for connection in list(server._open)))
        first.sendall(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert first.recv(65536).startswith(b"HTTP/1.1 100 ")
        until(lambda: all(connection.waits for connection in list(server._open)))
        with connect(server) as third:
            assert get(third).startswith(b"HTTP/1.1 200 OK")
        assert ended(second)
        first.sendall(b"abc")
        assert first.recv(65536).endswith(b"abc")


def test_when_every_connection_is_being_answered_a_new_one_is_refused() -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def handler(head: object, read_body: object) -> Response:
        entered.release()
        release.wait(60)
        return Response()

    with serving(handler, limit=2) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(2)]
        for sock in busy:
            sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert entered.acquire(timeout=60)
        with connect(server) as sock:
            assert sock.recv(65536).startswith(b"HTTP/1.1 503 ")
        release.set()
        assert all(sock.recv(65536).startswith(b"HTTP/1.1 200 OK") for sock in busy)


def test_a_connection_for_which_there_is_no_thread_is_the_only_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    refused = threading.Event()

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "http" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(limit=1) as server:
        monkeypatch.setattr(threading.Thread, "start", no_more)
        with connect(server) as sock:
            assert sock.recv(1) == b""
        assert refused.is_set()
        with connect(server) as sock:
            assert get(sock).startswith(b"HTTP/1.1 200 OK")


def test_closing_ends_every_connection() -> None:
    with serving() as server:
        sock = connect(server)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(65536)
    assert sock.recv(1) == b""
    sock.close()


Start = Callable[..., socket.socket]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serve one end of a socket pair with a handler, and return the other end."""
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def begin(handler: Any, **timeouts: float) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname(), timeout=60)
            server, _ = listening.accept()
        connection = Connection(server, handler, Timeouts(**{"linger": 0.2, **timeouts}))
        thread = threading.Thread(target=connection.serve)
        thread.start()
        sockets.append(client)
        threads.append(thread)
        return client

    yield begin
    for each in sockets:
        each.close()
    for thread in threads:
        thread.join(timeout=60)
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


def test_expect_100_continue_is_answered(start: Start) -> None:
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
    assert begun.wait(60)
    client.close()
    assert done.wait(60)


def test_a_large_answer_arrives_whole(start: Start) -> None:
    body = bytes(range(256)) * 4096 * 3
    client = start(lambda head, read_body: Response(200, body))
    client.sendall(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert read_all(client).endswith(body)


def test_it_listens_until_its_block_ends(world: World) -> None:
    with listen(world) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        socket.create_connection(("127.0.0.1", server.port), timeout=60).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_whatever_is_sent_the_server_lives(world: World) -> None:
    """Noise, halves of requests, and requests with noise in them, on connections that are dropped
    at once."""
    noise = random.Random(7)
    with listen(world, timeouts=Timeouts(linger=0.05)) as server:
        good = f"GET /info HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()
        for _ in range(100):
            text = bytearray(good)
            for _ in range(noise.randrange(1, 6)):
                text[noise.randrange(len(text))] = noise.randrange(256)
            kind = noise.randrange(3)
            sent = (
                noise.randbytes(noise.randrange(1, 300))
                if kind == 0
                else good[: noise.randrange(len(good))]
                if kind == 1
                else bytes(text)
            )
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
                sock.sendall(sent)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            sock.sendall(good)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_many_clients_at_once_are_all_answered(world: World) -> None:
    answers: list[bytes] = []
    with listen(world) as server:
        request = f"GET /info HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()

        def ask() -> None:
            for _ in range(10):
                with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
                    sock.sendall(request)
                    answers.append(sock.recv(65536)[:15])

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert answers == [b"HTTP/1.1 200 OK"] * 200


def test_two_on_one_port_are_refused(world: World) -> None:
    with listen(world) as server, pytest.raises(ZeroTrialError, match="Choose another port"):
        listen(world, port=server.port)
