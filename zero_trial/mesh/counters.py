"""How much each collective moved: calls, elements and bytes, by kind and axis.

An entry counts what this rank has to send in the best algorithm, so that the formulas of the ZeRO paper can be compared with it directly. With n
elements in the whole buffer and N ranks on the axis:

    reduce_scatter, all_gather    n (N-1)/N
    all_reduce                  2 n (N-1)/N
    broadcast                     n          on the source, 0 elsewhere
    send                          n
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass
class Traffic:
    """Calls, elements and bytes of one kind of collective on one axis."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


class CommCounters:
    """Sums of traffic since the last :meth:`reset`, by (kind, axis)."""

    def __init__(self) -> None:
        self._table: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def add(self, kind: str, axis: str, elements: int, itemsize: int) -> None:
        entry = self._table[kind, axis]
        entry.calls += 1
        entry.elements += elements
        entry.bytes += elements * itemsize

    def get(self, kind: str, axis: str) -> Traffic:
        return self._table.get((kind, axis), Traffic())

    def total(self, *kinds: str, min_elements: int = 0) -> Traffic:
        """The sum over all axes of the given kinds (all kinds if none is given)."""
        out = Traffic()
        for (kind, _), entry in self._table.items():
            if (not kinds or kind in kinds) and entry.elements >= min_elements:
                out.calls += entry.calls
                out.elements += entry.elements
                out.bytes += entry.bytes
        return out

    def table(self) -> dict[str, dict[str, int]]:
        """Plain numbers for a report: ``{"reduce_scatter/shard": {"calls": 3, ...}}``."""
        return {f"{kind}/{axis}": vars(entry).copy() for (kind, axis), entry in sorted(self._table.items())}

    def reset(self) -> None:
        self._table.clear()
