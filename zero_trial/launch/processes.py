"""The processes of one run: tied to their parent, found by a mark in their environment, ended together.

No process of a run outlives it. Three things see to that, each for the case in which the others cannot act: the kernel kills a tied process when its
parent dies (Linux), a watching thread does the same elsewhere, and at the end of a run whatever still carries its mark is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "ZERO_TRIAL_RUN_MARK"
"""Environment variable that all processes of a run inherit; its value is unique to the run."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WATCH_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """Tie this process to ``parent`` (its pid): it is killed when the parent ends. Ends at once when the parent is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            _watch_parent(parent)
    else:
        _watch_parent(parent)
    if os.getppid() != parent:  # it died between our start and the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    """The tie for kernels without a parent-death signal: a daemon thread that looks every half second."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="zero_trial-parent-watch", daemon=True).start()


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        # Either no /proc on this system (the signal above is the answer) or gone in this instant.
        return not Path("/proc/self/stat").exists()
    except OSError:
        return False
    # The state follows the command name, which is in brackets and may itself hold brackets and blanks.
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def marked(mark: str) -> list[int]:
    """Pids of this user's processes whose environment carries ``mark``; empty where there is no /proc. Never this process."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return [pid for pid in found if is_running(pid)]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that leads a group as a group, to the others alone; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
