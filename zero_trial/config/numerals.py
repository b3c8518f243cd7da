"""Numbers as files hold them: as they stand, or as the strings that YAML 1.1 makes of them; and how they are best written."""

from __future__ import annotations

import math
import re

# What YAML 1.1 reads as a string although a person means a number: an exponent without a dot or without a sign (1e-4, 5e8, 1.0e4).
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Mismatch(Exception):
    """A value is not of its kind; ``expected`` in words, and a ``fix`` where one is clear."""

    def __init__(self, expected: str, fix: str | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.fix = fix


def as_number(value: object, expected: str) -> tuple[int | float, str | None]:
    """A number as it stands, or the YAML string trap ('1e-4') with its warning; raises Mismatch for anything else, bools included."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value, None
    if isinstance(value, str) and EXPONENT.fullmatch(value.strip()):
        number = float(value)
        if math.isfinite(number):
            return number, f"'{value}' is a string in YAML 1.1. Write {spell_float(number)}."
    fix = None
    if isinstance(value, str):
        try:
            float(value)
            fix = f"Write {value.strip()} without quotes."
        except ValueError:
            pass
    raise Mismatch(expected, fix)


def spell_float(number: float) -> str:
    """A float in a form that JSON and YAML 1.1 both read as a number: a dot in the mantissa and a sign in the exponent."""
    text = repr(number)
    if "e" not in text:
        return text if abs(number) >= 1e-3 or number == 0 else _scientific(f"{number:e}")
    return _scientific(text)


def _scientific(text: str) -> str:
    mantissa, exponent = text.split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"
