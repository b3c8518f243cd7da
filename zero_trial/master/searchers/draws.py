"""The random stream of a search: the n-th trial has a stream of its own, so that the whole state is a seed and a count."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass
class Draws:
    """``drawn`` streams have been taken of the search that was seeded with ``seed``."""

    seed: int
    drawn: int = 0

    def next(self) -> random.Random:
        """The stream of the next trial. What a trial gets depends on its number only, never on the order of events before it."""
        self.drawn += 1
        return random.Random(f"{self.seed}/{self.drawn}")

    def as_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "drawn": self.drawn}
