"""Ranks that exchange JSON-able values through one injected all-gather of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

AllGatherBytes = Callable[[bytes], list[bytes]]


def alone(payload: bytes) -> list[bytes]:
    """The all-gather of a world of one."""
    return [payload]


@dataclass(frozen=True)
class JsonDistributed:
    """The ``Distributed`` of protocols.py over ``all_gather``: a collective that gives every rank's bytes, in rank
    order.

    Values travel as JSON, so that what a rank receives is the same with one rank as with many (tuples become lists
    everywhere).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    all_gather: AllGatherBytes = alone

    def allgather(self, value: Any) -> list[Any]:
        return [json.loads(payload) for payload in self.all_gather(json.dumps(value).encode())]

    def gather(self, value: Any) -> list[Any] | None:
        values = self.allgather(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        # Everyone sends something: the price of a second primitive is not worth the few bytes.
        return self.allgather(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        self.allgather(None)
