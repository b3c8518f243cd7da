"""The HTTP side as one thing."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from tests.master.world import World
from zero_trial.errors import ZeroTrialError
from zero_trial.master.http import Server
from zero_trial.master.http.server import Timeouts


def test_it_listens_until_its_block_ends(world: World) -> None:
    with Server(world) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        socket.create_connection(("127.0.0.1", server.port), timeout=10).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_whatever_is_sent_the_server_lives(world: World) -> None:
    """Noise, halves of requests, and requests with noise in them, on connections that are dropped at once."""
    noise = random.Random(7)
    with Server(world, timeouts=Timeouts(linger=0.05, head=0.2, first=0.2)) as server:
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
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
                sock.sendall(sent)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(good)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_many_clients_at_once_are_all_answered(world: World) -> None:
    answers: list[bytes] = []
    with Server(world) as server:
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
    with Server(world) as server, pytest.raises(ZeroTrialError, match="Choose another port"):
        Server(world, port=server.port)
