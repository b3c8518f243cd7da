"""Ports of an allocation."""

from __future__ import annotations

import socket

import pytest

from zero_trial.master.agent.environment import GAP, Ports, free_ports


def test_they_are_free_distinct_and_sixteen_apart() -> None:
    ports = free_ports()
    assert ports.comm_2 == ports.comm_1 + GAP == ports.comm_1 + 16
    for port in (ports.c10d, ports.comm_1, ports.comm_2, ports.ssh):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_what_others_were_given_is_avoided() -> None:
    taken: set[int] = set()
    for _ in range(20):
        ports = free_ports(taken)
        assert not ports.taken() & taken
        taken |= ports.taken()


def test_no_ports_is_an_error() -> None:
    with pytest.raises(OSError, match="no free"):
        free_ports(set(range(65536)))


def test_the_range_covers_every_slot() -> None:
    assert Ports(1, 100, 2).taken() == {1, 2, *range(100, 132)}
