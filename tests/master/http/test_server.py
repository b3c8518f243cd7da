"""The listening socket: loopback, a bound on connections, and room made by those that say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from zero_trial.errors import ZeroTrialError
from zero_trial.master.http.response import Response
from zero_trial.master.http.server import HttpServer, Timeouts


@contextlib.contextmanager
def serving(handler: object = lambda head, read_body: Response(), limit: int = 4) -> Iterator[HttpServer]:
    with HttpServer(limit=limit, timeouts=Timeouts(linger=0.1)) as server:
        server.start(handler)  # type: ignore[arg-type]
        yield server


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def get(sock: socket.socket) -> bytes:
    sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    parts = []
    while data := sock.recv(65536):
        parts.append(data)
    return b"".join(parts)


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


def test_clients_that_say_nothing_or_say_it_slowly_lock_nobody_out() -> None:
    with serving(limit=4) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(12)]
        for sock in slow[::2]:
            with contextlib.suppress(OSError):
                sock.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        with connect(server) as sock:
            assert get(sock).startswith(b"HTTP/1.1 200 OK")


def test_when_every_connection_is_being_answered_a_new_one_is_told_so() -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def handler(head: object, read_body: object) -> Response:
        entered.release()
        release.wait(10)
        return Response()

    with serving(handler, limit=2) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(2)]
        for sock in busy:
            sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert entered.acquire(timeout=10)
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
