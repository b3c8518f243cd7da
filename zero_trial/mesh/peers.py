"""Waiting for processes of this host: until something that they write is there, they have ended, or time is up."""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Callable, Mapping

ELSEWHERE = "is at another operation"  # in the text of an error: a rank has come, with another call

_SPIN_SECONDS = 1e-4  # ranks that arrive together meet within this; then the core is given to others
_LONGEST_NAP_SECONDS = 1e-3
_LOOK_SECONDS = 0.05  # how often a waiting rank looks whether its peers still live


def offered() -> bool:
    """Whether ranks can wait for one another in shared memory: this machine keeps the order of writes (x86), on which a number that is written
    after its payload relies, and processes can be watched."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open")


class Peers:
    """The other ranks of an axis as processes: axis index -> process id."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._watches = {index: os.pidfd_open(process) for index, process in processes.items()}

    def await_(self, index: int, ready: Callable[[], bool], timeout: float) -> None:
        """Returns when ``ready()``. Raises RuntimeError when the process of axis index ``index`` has ended (``closed``) or after ``timeout``
        seconds (``timed out``).

        Spins for a moment, then naps: a rank that waits long leaves its core to the one that it waits for.
        """
        if ready():
            return
        begun = time.monotonic()
        nap, look, deadline = 0.0, begun + _LOOK_SECONDS, begun + timeout
        while not ready():
            now = time.monotonic()
            if now - begun < _SPIN_SECONDS:
                os.sched_yield()
                continue
            if now >= look:
                look = now + _LOOK_SECONDS
                if self._has_ended(index) and not ready():
                    raise RuntimeError(f"closed: the process of axis index {index} has ended")
            if now >= deadline:
                raise RuntimeError("timed out")
            nap = min(nap + 2e-5, _LONGEST_NAP_SECONDS)
            time.sleep(nap)

    def _has_ended(self, index: int) -> bool:
        """Whether the process is gone, also if nobody has asked for its exit status yet."""
        poll = select.poll()
        poll.register(self._watches[index], select.POLLIN)
        return bool(poll.poll(0))
