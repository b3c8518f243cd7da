"""Network interfaces by the address they lead to."""

from __future__ import annotations

import socket
import sys

import pytest

from zero_trial.launch.this_host import interface_towards, loopback

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="interfaces are asked for their addresses through Linux's ioctl"
)


@linux
def test_this_host_is_reached_through_loopback():
    assert interface_towards("127.0.0.1") == loopback() == "lo"


def test_a_name_that_does_not_resolve_gives_nothing(monkeypatch: pytest.MonkeyPatch):
    class Unreachable:
        def __enter__(self) -> Unreachable:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def connect(self, address: object) -> None:
            raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "socket", lambda *args: Unreachable())
    assert interface_towards("no.such.host.invalid") is None
