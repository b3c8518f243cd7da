"""The HTTP side as one thing."""

from __future__ import annotations

import socket

import pytest

from tests.master.api.fake_cluster import FakeCluster
from zero_trial.errors import ZeroTrialError
from zero_trial.master.api import Server


def test_it_listens_until_its_block_ends() -> None:
    with Server(FakeCluster()) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        socket.create_connection(("127.0.0.1", server.port), timeout=10).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_two_on_one_port_are_refused() -> None:
    with Server(FakeCluster()) as server, pytest.raises(ZeroTrialError, match="Choose another port"):
        Server(FakeCluster(), port=server.port)
