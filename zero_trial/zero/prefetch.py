"""In which order a model uses its blocks, remembered from the last step, and what it says about the next. Pure.

recorded   root  h0  h1  h2 | h2  h1  h0
cursor                ^        the next needs: h2, then h2 (still live), h1
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate


class UseOrder:
    """The sequence of blocks of one step, and a cursor in that of the step before.

    A step that leaves the remembered order is followed as it goes, without prefetching, and becomes the order of the next. A use costs time
    for the blocks that are looked ahead at, not for all that the step still has (blocks times micro-batches, twice).
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._last: list[str] = []
        self._passed: list[int] = [0]  # elements of all uses of the last step before each of them
        self._uses: dict[str, list[int]] = {}  # by block: its places in the last step
        self._now: list[str] = []
        self._seen: set[str] = set()
        self.on_track = False

    def start_step(self) -> None:
        """A new step begins: what was recorded becomes the prediction."""
        if self._now and self._now != self._last:
            self._last = self._now
            self._passed = [0, *accumulate(self._sizes[block] for block in self._last)]
            self._uses = {}
            for position, block in enumerate(self._last):
                self._uses.setdefault(block, []).append(position)
        self._now = []
        self._seen = set()
        self.on_track = bool(self._last)

    def visit(self, block: str) -> None:
        """``block`` is used now."""
        position = len(self._now)
        if position >= len(self._last) or self._last[position] != block:
            self.on_track = False
        self._now.append(block)
        self._seen.add(block)

    def seen(self, block: str) -> bool:
        """Has ``block`` been used since the step began?"""
        return block in self._seen

    def upcoming(self, budget: int) -> list[str]:
        """The blocks that come next, different ones, while their elements fit into ``budget``; the first always, unless the order was left."""
        if not self.on_track:
            return []
        found: dict[str, None] = {}
        for position in range(len(self._now), len(self._last)):
            block = self._last[position]
            if block in found:
                continue
            if found and self._sizes[block] > budget:
                break
            found[block] = None
            budget -= self._sizes[block]
            if budget <= 0 or len(found) == len(self._uses):
                break
        return list(found)

    def distance(self, block: str) -> int | None:
        """Elements of the blocks that are used before ``block`` is used again in this step; None if it is not, or if that is unknown."""
        if not self.on_track:
            return None
        now, places = len(self._now), self._uses.get(block, [])
        later = bisect_left(places, now)
        return self._passed[places[later]] - self._passed[now] if later < len(places) else None
