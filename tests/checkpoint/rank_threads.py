"""Several ranks as threads of one process, with the one exchange that checkpoints need."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

TIMEOUT = 20.0


class RankThreads:
    """The exchange between threads; values really travel as JSON text."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.board: list[str] = [""] * size
        self.exchanges = 0


class ThreadRank:
    """One rank's view."""

    def __init__(self, shared: RankThreads, index: int) -> None:
        self.shared, self.index, self.size = shared, index, shared.size

    def gather_json(self, value: Any, label: str) -> list[Any]:
        self.shared.board[self.index] = json.dumps(value, allow_nan=False)
        self.shared.barrier.wait(TIMEOUT)
        out = [json.loads(text) for text in self.shared.board]
        if self.shared.barrier.wait(TIMEOUT) == 0:
            self.shared.exchanges += 1
        return out

    def gather_row(self, row: list[int], label: str) -> list[list[int]]:
        return self.gather_json(row, label)


def on_ranks(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """``work`` on every rank; its results or the errors that it raised, in order."""
    shared = RankThreads(size)
    results: list[Any] = [None] * size

    def rank_main(index: int) -> None:
        try:
            results[index] = work(ThreadRank(shared, index))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=rank_main, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT * 2)
    return results
