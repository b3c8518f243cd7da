"""How numbers are written on a page: short, with their unit, and the same everywhere."""

from __future__ import annotations

import math
from typing import Any


def number(value: float | None, digits: int = 4) -> str:
    """About ``digits`` significant digits: 0.00391, 2.798, 13128, 1.2e-05; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e7:
        mantissa, exponent = f"{value:.{max(digits - 2, 0)}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def count(value: float) -> str:
    """A count in three digits with its thousands: 667.6k, 1.2M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{number(value / limit, 3 if abs(value) < 100 * limit else 4)}{letter}"
    return number(value, 3)


def size(value: float | None) -> str:
    """Bytes in binary units; a dash for None."""
    if value is None:
        return "–"
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """54 s, 3 min 20 s, 1 h 04 min; a dash for None."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plain(value: Any) -> str:
    """A configuration's value as one would write it in JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return number(value, 6).replace("−", "-")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(plain(inner) for inner in value) + "]"
    return str(value)
