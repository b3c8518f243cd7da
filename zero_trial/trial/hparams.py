"""Hyperparameters: a plain dict whose keys can also be read as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class HParams(dict[str, Any]):
    """A ``dict`` in every respect; ``h.lr`` is ``h["lr"]``, and nested mappings are HParams too.

    Methods of ``dict`` win over keys of the same name (``h["keys"]`` always works). Lists stay lists.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: _nested(value) for key, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return HParams(value)
    return [_nested(item) for item in value] if isinstance(value, list) else value
