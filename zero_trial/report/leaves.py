"""The leaves of nested values by dotted name, and which of them a sweep varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zero_trial.config.hyperparameters import ranges
from zero_trial.report.data import Axis
from zero_trial.report.numbers import plain


def leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every value that is no mapping, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            found |= leaves(value, path)
        else:
            found[".".join(path)] = value
    return found


def swept_axes(hyperparameters: Mapping[str, Any]) -> tuple[Axis, ...]:
    """One axis for each range in an experiment's hyperparameters."""
    found = []
    for name in ranges(hyperparameters):
        entry: Any = hyperparameters
        for part in name.split("."):
            entry = entry[part]
        if entry["type"] == "categorical":
            found.append(Axis(name, choices=tuple(dict.fromkeys(plain(value) for value in entry["vals"]))))
        else:
            found.append(Axis(name, log=entry["type"] == "log"))
    return tuple(found)


def differing_axes(points: Sequence[Mapping[str, Any]]) -> tuple[Axis, ...]:
    """One axis for each leaf that is not the same everywhere; few numbers, or anything else, are choices."""
    names = dict.fromkeys(name for point in points for name in point)
    found = []
    for name in names:
        values = [point.get(name) for point in points]
        if len({plain(value) for value in values}) < 2:
            continue
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        if numbers and len({plain(value) for value in values}) > 4:
            found.append(Axis(name))
        else:
            spelled = {plain(value): value for value in values}
            order = sorted(spelled, key=lambda text: (_rank(spelled[text]), text))
            found.append(Axis(name, choices=tuple(order)))
    return tuple(found)


def _rank(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("inf")


def reach(values: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name; None if there is none."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
