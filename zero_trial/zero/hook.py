"""A hook of ours on a user's module, which a deep copy of that module does not take along.

``copy.deepcopy(engine.module)`` (an EMA, a frozen reference model) then is an ordinary module: it reaches neither the engine's
process groups nor its shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """Calls ``call``; copied, it does nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""
