"""Stragglers: a rank that all others wait for, found by how long each rank is busy between two talks.

Ranks do the same work and meet in every step, so they all take as long as the slowest. What differs is how much of that a rank waits for
others: the slow one does not wait. Busy time is training time without the waiting. A rank that is busy twice as long as the others usually
are, in two stretches of steps one after the other, is named once.

Only where ranks wait on the host can it be seen, which is on CPU: on CUDA the device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

STEPS = 4  # of a stretch, at least
FACTOR = 2.0  # of the others' busy time
EXCESS_SECONDS = 0.002  # per step: less is not worth a word, and may be rank 0's reporting
STRETCHES = 2


class StragglerWatch:
    """What one rank knows of all ranks' busy seconds. Pure: :meth:`see` is told, and answers."""

    def __init__(self) -> None:
        self._begin: int | None = None  # steps complete at the beginning of the stretch
        self._busy: list[float] = []  # of each rank in the stretch so far
        self._suspect: tuple[int, int] = (-1, 0)  # rank, stretches in a row
        self._named: set[int] = set()

    def see(self, step: int, busy: Sequence[float | None]) -> str | None:
        """``busy``: seconds of every rank since the last talk; ``step`` steps are complete now. What there is to say of a straggler.

        The first talk only begins the count: a first step is like no other. A rank that says None ends the watch.
        """
        known = [seconds for seconds in busy if seconds is not None]
        if len(known) < 2 or len(known) < len(busy):
            return None
        if self._begin is None:
            self._begin, self._busy = step, [0.0] * len(known)
            return None
        self._busy = [sum(pair) for pair in zip(self._busy, known, strict=True)]
        steps = step - self._begin
        if steps < STEPS:
            return None
        begin, each = self._begin, [seconds / steps for seconds in self._busy]
        self._begin, self._busy = step, [0.0] * len(known)
        return self._judge(begin, step, each)

    def _judge(self, begin: int, step: int, each: list[float]) -> str | None:
        rank = max(range(len(each)), key=each.__getitem__)
        others = median(each[:rank] + each[rank + 1 :])
        slow = each[rank] >= FACTOR * others and each[rank] - others >= EXCESS_SECONDS
        self._suspect = (rank, self._suspect[1] + 1 if rank == self._suspect[0] else 1) if slow else (-1, 0)
        if self._suspect[1] < STRETCHES or rank in self._named:
            return None
        self._named.add(rank)
        return (
            f"rank {rank} keeps the others waiting: in steps {begin + 1} to {step} it was busy {_time(each[rank])} per step, "
            f"and others {_time(others)}. Look at its data loading, and at what else runs on its host"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
