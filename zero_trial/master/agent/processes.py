"""Processes of this machine: who they are beyond their pid, whose children they are, and how they are ended for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_STATE, _PARENT, _START = 0, 1, 19  # fields of /proc/PID/stat after the name, see proc(5)


@dataclass(frozen=True)
class Identity:
    """One process for all times: pids are used again, a pid with its start is not.

    ``start`` is the boot and the clock tick at which it started, as ``boot:tick``; empty where there is no /proc.
    """

    pid: int
    start: str

    @property
    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        if self.pid <= 0:  # to kill(2) that is a group of processes, ours among them
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return not self.start
        fields = _stat(self.pid)
        if fields is None:
            return not _PROC.joinpath("self", "stat").exists()
        return fields[_STATE] not in ("Z", "X") and (not self.start or _start_of(fields) == self.start)

    @property
    def before_boot(self) -> bool:
        """Whether it started before the machine did: it ended with the machine."""
        return bool(self.start) and self.start.partition(":")[0] != _boot()

    def send(self, number: signal.Signals) -> None:
        """Signal this process, and nobody who was given its pid after it."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def identify(pid: int) -> Identity:
    """Who a running process is."""
    fields = _stat(pid)
    return Identity(pid, _start_of(fields) if fields else "")


def adopt_orphans() -> bool:
    """Make this process the parent of all its descendants that lose theirs (Linux); False where that cannot be done."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, zombies left out, parents before children; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in _PROC.glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
            if fields[_STATE] in ("Z", "X"):
                dead.add(int(entry.name))
    found: list[int] = []
    todo = list(children.get(pid, ()))
    while todo:
        child = todo.pop(0)
        found.append(child)
        todo.extend(children.get(child, ()))
    return [child for child in found if child not in dead]


def marked(name: str, value: str) -> list[int]:
    """Pids of processes that were started with this environment variable; empty where there is no /proc. Never this process."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def sweep(name: str, value: str, seconds: float = 5.0) -> None:
    """Kill all processes that carry the mark, until none is left or the time is up: one may have forked while we looked."""
    until = time.monotonic() + seconds
    while (pids := marked(name, value)) and time.monotonic() < until:
        send(pids, signal.SIGKILL)
        time.sleep(0.02)


def _start_of(fields: list[str]) -> str:
    return f"{_boot()}:{fields[_START]}"


def _boot() -> str:
    """What this boot is called; empty where there is no /proc."""
    try:
        return _PROC.joinpath("sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    try:
        text = _PROC.joinpath(str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The state follows the command name, which is in brackets and may itself hold brackets and blanks.
    return text.rpartition(")")[2].split()
