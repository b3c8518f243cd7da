"""One bracket of adaptive_asha: a ladder of rungs, at each of which only the best 1/divisor of the trials seen so far may go on."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORST = sys.float_info.max
"""The metric of a trial that ended early: behind every trial that reported one."""


@dataclass
class Rung:
    """``units``: how much training a trial needs to be measured here. ``entries``: (metric, request id), smallest metric first."""

    units: int
    entries: list[tuple[float, str]] = field(default_factory=list)

    def insert(self, metric: float, request_id: str) -> int:
        """Put a metric in its place, before equal ones, and return its rank from 0."""
        rank = bisect.bisect_left([entry[0] for entry in self.entries], metric)
        self.entries.insert(rank, (metric, request_id))
        return rank

    def remove(self, request_id: str) -> None:
        self.entries = [entry for entry in self.entries if entry[1] != request_id]


@dataclass
class Bracket:
    """A ladder whose top rung is the whole training; ``position`` is the rung each of its trials has to pass next."""

    rungs: list[Rung]
    divisor: float
    max_trials: int
    max_concurrent: int
    position: dict[str, int] = field(default_factory=dict)
    invalid: int = 0
    ended: int = 0

    @classmethod
    def ladder(cls, rungs: int, divisor: float, max_time: int, max_trials: int, max_concurrent: int) -> Bracket:
        """Rung k below the top asks for max_time / divisor^k units, at least 1 (Li et al. 2020, "A System for Massively Parallel
        Hyperparameter Tuning", Alg. 2, with the reduction factor called divisor).
        """
        units = [max(int(max_time / divisor ** (rungs - 1 - number)), 1) for number in range(rungs)]
        return cls([Rung(need) for need in units], divisor, max_trials, max_concurrent)

    @property
    def valid(self) -> int:
        """Trials that count against ``max_trials``."""
        return len(self.position) - self.invalid

    def first_trials(self) -> int:
        return min(self.max_concurrent, self.max_trials)

    def climb(self, request_id: str, time: int, metric: float) -> bool:
        """A validation after ``time`` units; whether the trial must stop. One validation may pass several rungs."""
        for number in range(self.position[request_id], len(self.rungs)):
            rung = self.rungs[number]
            self.position[request_id] = number
            if time < rung.units:
                return False
            rank = rung.insert(metric, request_id)
            top = number == len(self.rungs) - 1
            if top or rank >= max(int(len(rung.entries) / self.divisor), 1):
                return True
        return False

    def drop_invalid(self, request_id: str) -> None:
        """Forget what a trial with invalid hyperparameters has reported."""
        self.invalid += 1
        for rung in self.rungs:
            rung.remove(request_id)

    def drop_early(self, request_id: str) -> None:
        """A trial that ended by itself is last in its rung for ever."""
        self.rungs[self.position[request_id]].insert(WORST, request_id)

    def progress(self) -> float:
        """Measured trials over 1.2 max_trials, since even the last ones need time; at the end, trials over max_trials."""
        measured = len(self.rungs[0].entries)
        done = measured / (1.2 * self.max_trials)
        return max((self.ended - self.invalid) / self.max_trials, done) if measured == self.max_trials else done

    def as_json(self) -> dict[str, Any]:
        return {
            "rungs": [[list(entry) for entry in rung.entries] for rung in self.rungs],
            "position": dict(self.position),
            "invalid": self.invalid,
            "ended": self.ended,
        }

    def take(self, state: Mapping[str, Any]) -> None:
        for rung, entries in zip(self.rungs, state["rungs"], strict=True):
            rung.entries = [(float(metric), request_id) for metric, request_id in entries]
        self.position = dict(state["position"])
        self.invalid, self.ended = state["invalid"], state["ended"]
