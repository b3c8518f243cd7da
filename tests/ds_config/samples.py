"""For any row of the table: a value that is of its kind and asks for something, and one that is of
no kind."""

from __future__ import annotations

from typing import Any

from zero_trial.ds_config.key import Key
from zero_trial.ds_config.keys_zero import Folders
from zero_trial.schema.types import AnyOf, Bool, DType, Float, Int, Names, Numbers, Section, Text, Type


def other_value(row: Key) -> Any:
    """A legal value that differs from the default."""
    return next(value for value in _candidates(row.type, row) if value != row.default and value not in row.harmless)


def _candidates(kind: Type, row: Key) -> list[Any]:
    if isinstance(kind, Bool):
        return [True, False]
    if isinstance(kind, Int):
        wanted = [3, 2, 1, 0, 7]
        return [n for n in wanted if (kind.low is None or n >= kind.low) and (kind.high is None or n <= kind.high)]
    if isinstance(kind, Float):
        return [0.5, 2.0] if kind.high is None or kind.high >= 2 else [0.5, 0.25]
    if isinstance(kind, Text):
        return list(kind.choices) or [
            "AdamW" if row.path == "optimizer.type" else "StepLR" if row.path == "scheduler.type" else "words"
        ]
    if isinstance(kind, DType):
        return ["bf16", "fp16"]
    if isinstance(kind, Names):
        return [["Block"]]
    if isinstance(kind, Folders):
        return [("/disk", "/other")]
    if isinstance(kind, Numbers):
        return [[0.5] * (kind.count or 2)]
    if isinstance(kind, AnyOf):
        return [value for inner in kind.kinds for value in _candidates(inner, row)]
    if isinstance(kind, Section):
        return [{}]
    if row.path.endswith(".params"):
        return [{"lr": 0.5} if row.path.startswith("optimizer") else {"step_size": 3}]
    return [{"enabled": True}]


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for "a.b", with what its section needs beside it."""
    found: dict[str, Any] = {}
    section = found
    parts = path.split(".")
    for part in parts[:-1]:
        section = section.setdefault(part, {})
    section[parts[-1]] = value
    if parts[0] in ("optimizer", "scheduler") and len(parts) > 1:
        found[parts[0]].setdefault("type", "SGD" if parts[0] == "optimizer" else "StepLR")
    return found
