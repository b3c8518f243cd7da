"""Where every rank stands: the last collective that it entered, published so that a rank that waits in vain can say for whom.

A daemon thread writes this rank's position into the process group's key-value store a few times per second, and only when it changed:
the hot path pays one attribute assignment per collective. The thread, not the stuck main thread, publishes, so a rank that hangs in
user code is seen too.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, NamedTuple

PERIOD_SECONDS = 0.25


class Position(NamedTuple):
    """One rank's place in the sequence of collectives. A tuple: the hot path makes four of them per collective."""

    step: int = 0
    sequence: int = 0
    operation: str = "start"
    since: float = 0.0  # time.time() of entering it
    inside: bool = False  # still waiting in it
    gave_up: bool = False  # it raised a MeshError there and waits no more

    def describe(self) -> str:
        verb = "gave up in" if self.gave_up else "in" if self.inside else "after"
        return f"at step {self.step}, {verb} {self.operation} (collective {self.sequence}, {max(time.time() - self.since, 0):.0f} s ago)"


class Board:
    """This rank's position, and everyone's as last published."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.sequence = 0
        self.waited = 0.0  # seconds spent in collectives, by the host
        self._now = Position(since=time.time())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and world_size > 1:
            self._thread = threading.Thread(target=self._publish_loop, name="zero_trial-board", daemon=True)
            self._thread.start()

    def enter(self, operation: str) -> None:
        self.sequence += 1
        self._now = Position(self.step, self.sequence, operation, time.time(), True)

    def leave(self) -> None:
        now = self._now
        if now.inside:
            self.waited += max(time.time() - now.since, 0.0)
            self._now = Position(*now[:4])

    def waiting(self, operation: str) -> None:
        """The main thread now waits for an operation that it entered earlier."""
        now = self._now
        self._now = Position(now.step, now.sequence, operation, time.time(), True)

    def give_up(self) -> None:
        """This rank's collective failed; whoever comes later need not wait for it."""
        self._now = self._now._replace(gave_up=True)

    def positions(self) -> dict[int, Position | None]:
        """Every rank's last published position; None for a rank that never published or whose store is gone."""
        found: dict[int, Position | None] = {}
        for rank in range(self.world_size):
            found[rank] = self._now if rank == self.rank else self._read(rank)
        return found

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None

    def _read(self, rank: int) -> Position | None:
        key = f"zero_trial/position/{rank}"
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return Position(**json.loads(self._store.get(key)))
        except (RuntimeError, ValueError):  # the store's host is gone: then nobody's position can be had
            return None

    def _publish_loop(self) -> None:
        published: Position | None = None
        while not self._stop.wait(PERIOD_SECONDS):
            now = self._now
            if now is published:
                continue
            try:
                self._store.set(f"zero_trial/position/{self.rank}", json.dumps(now._asdict()))
            except RuntimeError:
                return
            published = now
