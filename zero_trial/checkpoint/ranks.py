"""What saving needs of the other ranks: a place among them, and an exchange of small JSON values."""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """All ranks that save one checkpoint together. ``gather_json`` is collective and gives every rank all values, in
    order."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_json(self, value: Any, label: str) -> list[Any]: ...


class Alone:
    """One process that saves by itself."""

    index = 0
    size = 1

    def gather_json(self, value: Any, label: str) -> list[Any]:
        return [value]
