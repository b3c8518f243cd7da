"""Processes of this machine: find running processes, descendants and processes with a mark; send
signals; tie a process to its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def descendants(pid: int) -> list[int]:
    """List all running descendants, parents first."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if is_running(child.pid)]


def marked(name: str, value: str) -> list[int]:
    """List this user's other running processes that were started with this variable."""
    found = []
    for process in psutil.process_iter():
        # skip processes of other users, or that have just ended
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.pid != os.getpid() and is_running(process.pid):
                found.append(process.pid)
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each running process; for a group leader, the whole group."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def sweep(name: str, value: str, seconds: float = 5.0) -> None:
    """Kill all processes with the mark. Repeat until none is left, because one may have forked."""
    until = time.monotonic() + seconds
    while pids := marked(name, value):  # slow on a busy machine
        send(pids, signal.SIGKILL)
        if time.monotonic() > until:
            return
        time.sleep(0.02)


def adopt_orphans() -> bool:
    """Become the parent of all orphaned descendants. Only on Linux; elsewhere return False."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` (its pid) ends; immediately if that has already
    ended. Only on Linux."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
