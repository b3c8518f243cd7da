"""An agreed early end: one rank leaves for a good reason, and every other one leaves too instead of waiting for it.

rank 1   claim("early exit") -> True      a key in the process group's store, so it is seen before rank 1's connections close
rank 0   in a collective with rank 1      its watch sees the key within a second and ends the process in order
rank 2   raises for the same reason       claim("early exit") -> False: somebody else has told already
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

PERIOD_SECONDS = 0.5
GRACE_SECONDS = 3.0  # for a rank that is about to leave by itself
KEY = "zero_trial/claim/"


class Farewell:
    """This rank's view of what the ranks have claimed. ``store`` is the process group's; None for a world of one."""

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._own: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, name: str) -> bool:
        """Whether this rank is the first of all to claim ``name``. A store that is gone leaves it to each rank."""
        if name in self._own:
            return False
        self._own.add(name)
        if self._store is None:
            return True
        try:
            return int(self._store.add(KEY + name, 1)) == 1
        except RuntimeError:
            return True

    def claimed(self, name: str) -> bool:
        """Whether any rank has claimed ``name``."""
        if name in self._own:
            return True
        try:
            return self._store is not None and bool(self._store.check([KEY + name]))
        except RuntimeError:  # its host is gone
            return False

    def watch(self, name: str, leave: Callable[[], None] | None = None) -> None:
        """From now on ``leave()`` is called, by a thread, soon after another rank has claimed ``name``.

        Unless given, it ends this process with code 0: the main thread may be stuck in a collective that never ends.
        """
        if self._store is None or self._thread is not None:
            return
        arguments = (name, leave if leave is not None else leave_process)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="zero_trial-farewell", daemon=True)
        self._thread.start()

    def _watch(self, name: str, leave: Callable[[], None]) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            if name not in self._own and self.claimed(name):
                if not self._stop.wait(GRACE_SECONDS):
                    leave()
                return

    def close(self) -> None:
        """Stops watching. Before the process group is left: the store goes with it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None


def leave_process() -> None:
    """Ends this process at once with code 0; what was printed is kept."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
