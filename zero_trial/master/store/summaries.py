"""A trial's metrics in summary, as a Determined master makes it: type, count, min, max, sum, mean and last value of each. Pure.

A value that is not a number (NaN) stays visible: min, max, sum and mean are NaN from then on. Values of two types make a metric a
"string", without numbers; and the last value of a metric that the newest report does not have is null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How JSON clients write what JSON cannot."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (dict, "object"),
    (list, "array"),
)


def as_float(value: int | float) -> float:
    """As a float; a whole number that none can hold is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def extend(summary: dict[str, dict[str, Any]], metrics: Mapping[str, Any]) -> None:
    """Add one report to the summary of its group."""
    for name, value in metrics.items():
        kind = kind_of(value)
        entry = summary.get(name)
        if entry is None:
            entry = summary[name] = {"type": kind}
        elif entry["type"] != kind:
            entry = summary[name] = {"type": "string"}
        if entry["type"] == "number":
            _count(entry, SPELLED[value] if isinstance(value, str) else as_float(value))
    for name, entry in summary.items():
        entry["last"] = metrics.get(name)


def kind_of(value: Any) -> str:
    """Determined's word for the type of a metric's value."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "number" if value in SPELLED else "date" if _TIME.fullmatch(value) else "string"
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "string")


def _count(entry: dict[str, Any], number: float) -> None:
    entry["count"] = entry.get("count", 0) + 1
    entry["min"] = _extreme(min, entry.get("min", number), number)
    entry["max"] = _extreme(max, entry.get("max", number), number)
    entry["sum"] = entry.get("sum", 0.0) + number
    entry["mean"] = entry["sum"] / entry["count"]


def _extreme(choose: Any, one: float, other: float) -> float:
    """The smaller or larger; an infinity on the side that is looked for wins over NaN, NaN over all else, as in Go's math."""
    end = choose(-math.inf, math.inf)
    if end in (one, other):
        return float(end)
    return math.nan if math.isnan(one) or math.isnan(other) else float(choose(one, other))
