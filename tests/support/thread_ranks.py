"""Ranks that are threads of one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from zero_trial.errors import MeshError
from zero_trial.trial.runtime.protocols import Distributed

Result = TypeVar("Result")
TIMEOUT_SECONDS = 30.0


class ThreadExchange:
    """Lets ``size`` threads exchange values, as JSON text. If one is late, the others raise
    MeshError."""

    def __init__(self, size: int, timeout: float = TIMEOUT_SECONDS) -> None:
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._arrived: dict[int, str] = {}
        # complete exchanges; they stay valid when a rank fails later
        self._rounds: list[list[str]] = []
        self._broken = False

    def exchange(self, rank: int, value: Any) -> list[Any]:
        with self._changed:
            number = len(self._rounds)
            self._arrived[rank] = json.dumps(value)
            if len(self._arrived) == self.size:
                self._rounds.append([self._arrived[index] for index in range(self.size)])
                self._arrived = {}
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._broken or len(self._rounds) > number, self._timeout)
            if len(self._rounds) <= number:
                raise MeshError("another rank has failed or did not arrive", where=f"rank {rank}, exchange")
            return [json.loads(text) for text in self._rounds[number]]

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def distributed(self, rank: int) -> Distributed:
        return Distributed(rank, self.size, rank, lambda value: self.exchange(rank, value))


def on_threads(size: int, body: Callable[[int], Any], failed: Callable[[], None] = lambda: None) -> list[Any]:
    """``body(rank)`` on a thread for each rank: what it returned, or the exception that it raised
    once ``failed`` was called."""
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error
            failed()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_SECONDS)
    return outcomes


def run_ranks(size: int, work: Callable[[Distributed], Result]) -> list[Result | BaseException]:
    """Call ``work`` on a thread per rank; return what each returned or raised."""
    meeting = ThreadExchange(size)
    return on_threads(size, lambda rank: work(meeting.distributed(rank)), meeting.abort)


class ThreadRank:
    """What a checkpoint uses of an ``AxisComm``, between threads."""

    def __init__(self, meeting: ThreadExchange, index: int) -> None:
        self.index, self.size, self.abort = index, meeting.size, meeting.abort
        self.gather_json: Any = lambda value, label: meeting.exchange(index, value)
        self.gather_row = self.gather_json


def on_ranks(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Call ``work`` on a thread per rank; return what each returned or raised."""
    meeting = ThreadExchange(size)
    return on_threads(size, lambda rank: work(ThreadRank(meeting, rank)), meeting.abort)
