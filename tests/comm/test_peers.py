"""Waiting for processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from zero_trial.comm.shm.segments import PeerProcesses


def test_what_is_there_is_not_waited_for() -> None:
    PeerProcesses({}).wait_until(3, lambda: True, 0.0)


def test_returns_when_it_is_there() -> None:
    there = threading.Event()
    threading.Timer(0.2, there.set).start()
    PeerProcesses({1: os.getpid()}).wait_until(1, there.is_set, 30.0)
    assert there.is_set()


def test_gives_up_in_time() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        PeerProcesses({1: os.getpid()}).wait_until(1, lambda: False, 0.05)


def test_a_killed_process_is_noticed_though_nobody_asked_for_its_status() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = PeerProcesses({1: child.pid})
    os.kill(child.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="closed: the process of axis index 1"):
        peers.wait_until(1, lambda: False, 60.0)
    assert time.monotonic() - begun < 30, "long before the timeout"
    child.communicate()
