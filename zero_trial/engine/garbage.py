"""``disable_python_gc``: Python's cycle collector is off while an engine that asked for it lives.

The collector belongs to the process, so this is the process's state: it comes back when the last such engine is destroyed or gone.
Reference counting goes on; only garbage in cycles waits until somebody calls ``gc.collect()``.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any


class CollectorPause:
    """Counts who wants the collector off."""

    def __init__(self) -> None:
        self._holders: dict[int, weakref.finalize[[int], Any]] = {}
        self._was_on = False

    def hold(self, owner: object) -> None:
        """Off, as long as ``owner`` lives and until :meth:`release`."""
        if id(owner) in self._holders:
            return
        if not self._holders:
            self._was_on = gc.isenabled()
            gc.disable()
        self._holders[id(owner)] = weakref.finalize(owner, self._drop, id(owner))

    def release(self, owner: object) -> None:
        """``owner`` no longer asks for it."""
        holder = self._holders.get(id(owner))
        if holder is not None:
            holder()

    def _drop(self, key: int) -> None:
        if self._holders.pop(key, None) is not None and not self._holders and self._was_on:
            gc.enable()


COLLECTOR = CollectorPause()
