"""The orders of a resource manager (start this run, end that one) and its two threads: one carries
out orders one after the other, the other looks again and again at what runs.

An order that fails for a reason that passes (a full disk, an engine that does not answer) is tried
again after 5 to 60 seconds, until it succeeds or another order for the same allocation comes.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from zero_trial.errors import MasterError

log = logging.getLogger(__name__)

_RETRY_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0)  # until the next attempt, by those before
_PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EAGAIN))
"""Faults of a disk that are not about one allocation."""


class EngineBusy(MasterError):
    """The engine does not answer, or takes no job now, for a reason that is not the job's."""


def is_passing(error: Exception) -> bool:
    """Tell whether what has kept an order from being carried out may be over soon."""
    return isinstance(error, EngineBusy) or (isinstance(error, OSError) and error.errno in _PASSING)


@dataclass
class _Order:
    """An order for one allocation. ``begins``: it starts the allocation."""

    allocation_id: str
    work: Callable[[], None]
    begins: bool
    attempts: int = 0
    due: float | None = None  # of the next attempt, monotonic; None: it is being tried
    why: str = ""
    said: str = ""  # why, as was reported


class OrderQueue:
    """Carries out orders and watches, each in a thread of its own. A fault of one allocation does
    not end the work for the others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._newest: dict[str, _Order] = {}  # by allocation, until it is carried out
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._faults: dict[str, str] = {}  # what was said of a look that fails, once: it comes again

    def begin(self, look: Callable[[], None], seconds: float, on_waiting: Callable[[str, str], None]) -> None:
        """Start the threads.

        Args:
            look: what the watch does, each so many ``seconds``.
            on_waiting: takes the allocation that cannot begin yet, and why.
        """
        self._threads = [
            threading.Thread(target=self._carry_out, name=f"{self._name}-work", daemon=True),
            threading.Thread(
                target=self._watch, args=(look, seconds, on_waiting), name=f"{self._name}-watch", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, allocation_id: str, work: Callable[[], None], *, begins: bool = False) -> None:
        """Carry out an order, later. An earlier one of this allocation is not tried again, except
        for one that ends it: a start does not undo that."""
        order = _Order(allocation_id, work, begins)
        with self._lock:
            before = self._newest.get(allocation_id)
            if before is None or before.begins or not begins:
                self._newest[allocation_id] = order
            self._orders.put(order)

    def guarded(self, what: str, look: Callable[[], None]) -> None:
        """Look, and log a fault instead of raising it."""
        try:
            look()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if self._faults.get(what) != fault:
                self._faults[what] = fault
                log.error("%s: %s", what, fault)
        else:
            self._faults.pop(what, None)

    def close(self) -> None:
        """End the threads; orders that wait are dropped."""
        self._closed.set()
        self._orders.put(None)
        for thread in self._threads:
            thread.join()

    def _carry_out(self) -> None:
        while (order := self._orders.get()) is not None:
            with self._lock:
                outdated = self._newest.get(order.allocation_id, order) is not order
            if outdated:
                continue
            try:
                order.work()
            except Exception as error:
                # an OSError comes here if the end of the allocation could not be recorded either
                if isinstance(error, (OSError, EngineBusy)):
                    self._delay(order, error)
                else:
                    log.error("an order could not be carried out: %s: %s", type(error).__name__, error)
                    self._forget(order)
            else:
                self._forget(order)

    def _delay(self, order: _Order, error: Exception) -> None:
        """Let an order be tried again, unless a newer one came while it was tried."""
        with self._lock:
            if self._newest.get(order.allocation_id) is not order:
                return
            seconds = _RETRY_SECONDS[min(order.attempts, len(_RETRY_SECONDS) - 1)]
            order.attempts, order.due, order.why = order.attempts + 1, time.monotonic() + seconds, str(error)
        if not order.begins and order.why != order.said:
            order.said = order.why
            log.warning("an order will be carried out later: %s", error)

    def _forget(self, order: _Order) -> None:
        with self._lock:
            if self._newest.get(order.allocation_id) is order:
                del self._newest[order.allocation_id]

    def _watch(self, look: Callable[[], None], seconds: float, on_waiting: Callable[[str, str], None]) -> None:
        while not self._closed.wait(seconds):
            self.guarded(self._name, look)
            with self._lock:
                orders = list(self._newest.values())
            for order in orders:
                self.guarded(f"allocation {order.allocation_id}", lambda order=order: self._look_at(order, on_waiting))  # type: ignore[misc]

    def _look_at(self, order: _Order, on_waiting: Callable[[str, str], None]) -> None:
        with self._lock:
            if self._newest.get(order.allocation_id) is not order:
                return
            if order.due is not None and time.monotonic() >= order.due:
                order.due = None
                self._orders.put(order)
        if order.begins and order.why != order.said:
            on_waiting(order.allocation_id, order.why)
            order.said = order.why
