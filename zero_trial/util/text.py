"""Text for people: numbers with units, and safe terminal output."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from zero_trial.errors import ConfigError

# ECMA-48: CSI sequences (colors, cursor), OSC and the other string sequences (titles, clipboard) up
# to their terminator or the end of the line, and the short escapes. The one-byte forms are U+0080
# to U+009F.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def strip_control(text: str) -> str:
    """Remove terminal escape sequences and control characters, except newlines and tabs.

    Use for all text from a trial, a file or a peer: an escape sequence could move the cursor,
    rename the window or fill the reader's clipboard. Unpaired surrogates become ``?``, so that the
    text can be encoded.
    """
    plain = _CONTROL.sub("", _SEQUENCE.sub("", text))
    return plain.encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, most: int = 120) -> str:
    """Return the text; shorten a long text to its beginning and end."""
    return text if len(text) <= most else f"{text[: most - most // 3 - 1]}…{text[-(most // 3) :]}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names, and the number of further names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str, where: str) -> int:
    """Return bytes of ``16GiB``, ``16 GB``, ``500M``, ``1e9``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([kKmMgGtT]?i?)[bB]?\s*", text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise ConfigError(
            "not a size",
            where=where,
            got=repr(text),
            expected="a number and a unit, such as 16GiB or 500MB",
        )
    return int(float(match[1]) * factor)


def format_number(value: float | None, digits: int = 4) -> str:
    """Format with about ``digits`` digits: 0.00391, 2.798, 13128, 1.2e-05; a dash for None."""
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


def format_count(value: float) -> str:
    """Format a count with a thousands suffix: 667.6k, 1.2M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{format_number(value / limit, 3 if abs(value) < 100 * limit else 4)}{letter}"
    return format_number(value, 3)


def format_bytes(value: float | None) -> str:
    """Format bytes in binary units; a dash for None."""
    if value is None:
        return "–"
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f} B"


def format_duration(seconds: float | None) -> str:
    """Format as 54 s, 3 min 20 s or 1 h 04 min; a dash for None."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_value(value: Any) -> str:
    """Format a configuration value as in JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return format_number(value, 6).replace("−", "-")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(inner) for inner in value) + "]"
    return str(value)


def spell_nonfinite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities as strings, like protobuf's JSON and therefore
    Determined: "NaN", "Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spell_nonfinite(item) for item in value]
    return value


def format_clock(seconds: float) -> str:
    """Format seconds as 00:12 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def format_metric(value: object) -> str:
    """Format a metric with four significant digits; return other values as text."""
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return ``Did you mean weight_decay?`` with the closest of ``known``, or None."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"Did you mean {by_lower[close[0]]}?" if close else None


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return one line per row, with columns two spaces apart; right-align columns in ``right``."""
    rows = [[strip_control(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
