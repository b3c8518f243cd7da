"""Numbers as files hold them: as they stand, or as the strings that YAML 1.1 makes of them; and how they are best written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What YAML 1.1 reads as a string although a person means a number: an exponent without a dot or without a sign (1e-4, 5e8, 1.0e4).
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class ValidationError(Exception):
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
    raise ValidationError(expected, fix)


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


# What a value may be: a kind says it in words for messages and reads one raw value strictly, or explains what it expected.


DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16", "torch.bfloat16": "bf16",
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """A value in its inside form, and a sentence for the user if it had to be understood rather than read."""

    value: Any
    warning: str | None = None


class Type:
    """Base of the kinds; ``says`` is what stands in messages and in the reference page."""

    def describe(self) -> str:
        raise NotImplementedError

    def read(self, value: object) -> Reading:
        """The inside form of ``value``; raises Mismatch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bool(Type):
    """true or false; 0, 1 and strings are refused."""

    def describe(self) -> str:
        return "true or false"

    def read(self, value: object) -> Reading:
        if isinstance(value, bool):
            return Reading(value)
        truth = {
            "true": "true",
            "yes": "true",
            "on": "true",
            "1": "true",
            "false": "false",
            "no": "false",
            "off": "false",
            "0": "false",
        }
        meant = truth.get(str(value).lower()) if isinstance(value, str | int) else None
        raise ValidationError(self.describe(), f"Write {meant}." if meant else None)


@dataclass(frozen=True)
class Int(Type):
    """A whole number in [low, high]; 5e8 is one. ``infinite`` lets Infinity stand for "never" and reads it as None."""

    low: int | None = None
    high: int | None = None
    unit: str = ""
    infinite: bool = False

    def describe(self) -> str:
        if self.low is not None and self.high is not None:
            text = f"an integer from {self.low} to {self.high}"
        elif self.low is not None:
            text = {0: "a non-negative integer", 1: "a positive integer"}.get(
                self.low, f"an integer of at least {self.low}"
            )
        else:
            text = "an integer"
        return f"{text} ({self.unit})" if self.unit else text

    def read(self, value: object) -> Reading:
        number, warning = as_number(value, self.describe())
        if self.infinite and number == math.inf:
            return Reading(None)
        if not math.isfinite(number) or number != int(number):
            raise ValidationError(self.describe())
        whole = int(number)
        if (self.low is not None and whole < self.low) or (self.high is not None and whole > self.high):
            raise ValidationError(self.describe())
        if warning:
            warning = f"'{value}' is a string in YAML 1.1. Write {whole}."
        return Reading(whole, warning)


@dataclass(frozen=True)
class Float(Type):
    """A finite number; ``above`` is an exclusive lower bound, ``low`` and ``high`` are inclusive."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def describe(self) -> str:
        if self.above is not None:
            limit = "a positive number" if self.above == 0 else f"a number above {self.above:g}"
        elif self.low is not None:
            limit = "a number of at least 0" if self.low == 0 else f"a number of at least {self.low:g}"
        else:
            limit = "a number"
        return f"{limit}, at most {self.high:g}" if self.high is not None else limit

    def read(self, value: object) -> Reading:
        number, warning = as_number(value, self.describe())
        fits = (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
        )
        if not fits:
            raise ValidationError(self.describe())
        return Reading(float(number), warning)


@dataclass(frozen=True)
class Text(Type):
    """A string, or one of ``choices`` in any case.

    ``synonyms`` are pairs of another word for a choice and that choice; ``starts`` are beginnings after which anything may stand.
    """

    choices: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()

    def describe(self) -> str:
        if not self.choices:
            return "a string"
        words = [*self.choices, *(f"{start}..." for start in self.starts)]
        return "one of " + ", ".join(f'"{word}"' for word in words)

    def read(self, value: object) -> Reading:
        if not isinstance(value, str):
            raise ValidationError(self.describe())
        if not self.choices:
            return Reading(value)
        meant = {choice.lower(): choice for choice in self.choices}
        meant |= {word.lower(): choice for word, choice in self.synonyms}
        if value.lower() in meant:
            return Reading(meant[value.lower()])
        if value.lower().startswith(self.starts):
            return Reading(value)
        raise ValidationError(self.describe())


@dataclass(frozen=True)
class DType(Type):
    """A floating dtype by name; torch's and numpy's spellings are understood."""

    def describe(self) -> str:
        return 'a dtype: "fp32", "fp16" or "bf16"'

    def read(self, value: object) -> Reading:
        name = DTYPES.get(value.lower()) if isinstance(value, str) else None
        if name is None:
            raise ValidationError(self.describe())
        return Reading(name)


@dataclass(frozen=True)
class Names(Type):
    """A list of strings; one string stands for a list of one. ``also`` are words allowed instead of a list."""

    also: tuple[str, ...] = ()

    def describe(self) -> str:
        return "a list of strings" + "".join(f', or "{word}"' for word in self.also)

    def read(self, value: object) -> Reading:
        if isinstance(value, str):
            return Reading((value,))
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return Reading(tuple(value))
        raise ValidationError(self.describe())


@dataclass(frozen=True)
class Numbers(Type):
    """A list of ``count`` numbers in [low, high), such as betas."""

    count: int | None = None
    low: float | None = None
    below: float | None = None

    def describe(self) -> str:
        text = f"a list of {self.count} numbers" if self.count else "a list of numbers"
        if self.low is not None and self.below is not None:
            text += f", each at least {self.low:g} and below {self.below:g}"
        return text

    def read(self, value: object) -> Reading:
        if not isinstance(value, list | tuple) or (self.count is not None and len(value) != self.count):
            raise ValidationError(self.describe())
        warnings = []
        numbers = []
        for item in value:
            number, warning = as_number(item, self.describe())
            if (
                not math.isfinite(number)
                or (self.low is not None and number < self.low)
                or (self.below is not None and number >= self.below)
            ):
                raise ValidationError(self.describe())
            numbers.append(float(number))
            warnings += [warning] if warning else []
        return Reading(tuple(numbers), " ".join(warnings) or None)


@dataclass(frozen=True)
class AnyOf(Type):
    """The first kind that takes the value: a number or a list of numbers, say."""

    kinds: tuple[Type, ...]

    def describe(self) -> str:
        return ", or ".join(kind.describe() for kind in self.kinds)

    def read(self, value: object) -> Reading:
        for kind in self.kinds:
            try:
                return kind.read(value)
            except ValidationError:
                continue
        raise ValidationError(self.describe())


@dataclass(frozen=True)
class Section(Type):
    """An object whose keys have rows of their own. ``switch``: a bare true or false stands for the section with this key set."""

    switch: str | None = None

    def describe(self) -> str:
        return "an object"

    def read(self, value: object) -> Reading:
        if not isinstance(value, Mapping):
            raise ValidationError(self.describe())
        return Reading(value)


@dataclass(frozen=True)
class Opaque(Type):
    """Anything at all, kept as it is: what stands inside is not looked at."""

    def describe(self) -> str:
        return "any value"

    def read(self, value: object) -> Reading:
        return Reading(value)
