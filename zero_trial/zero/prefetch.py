"""In which order a model uses its blocks, remembered from the last step, and what it says about the next. Pure.

recorded   root  h0  h1  h2 | h2  h1  h0
cursor                ^        the next needs: h2, then h2 (still live), h1
"""

from __future__ import annotations

from collections.abc import Mapping


class UseOrder:
    """The sequence of blocks of one step, and a cursor in that of the step before.

    A step that leaves the remembered order is followed as it goes, without prefetching, and becomes the order of the next.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._last: list[str] = []
        self._now: list[str] = []
        self.on_track = False

    def start_step(self) -> None:
        """A new step begins: what was recorded becomes the prediction."""
        if self._now:
            self._last = self._now
        self._now = []
        self.on_track = bool(self._last)

    def visit(self, block: str) -> None:
        """``block`` is used now."""
        position = len(self._now)
        if position >= len(self._last) or self._last[position] != block:
            self.on_track = False
        self._now.append(block)

    def seen(self, block: str) -> bool:
        """Has ``block`` been used since the step began?"""
        return block in self._now

    def upcoming(self, budget: int) -> list[str]:
        """The blocks that come next, different ones, while their elements fit into ``budget``; the first always, unless the order was left."""
        if not self.on_track:
            return []
        found: list[str] = []
        for block in self._last[len(self._now) :]:
            if block in found:
                continue
            if found and self._sizes[block] > budget:
                break
            found.append(block)
            budget -= self._sizes[block]
            if budget <= 0:
                break
        return found

    def distance(self, block: str) -> int | None:
        """Elements of the blocks that are used before ``block`` is used again in this step; None if it is not, or if that is unknown."""
        if not self.on_track:
            return None
        passed = 0
        for later in self._last[len(self._now) :]:
            if later == block:
                return passed
            passed += self._sizes[later]
        return None
