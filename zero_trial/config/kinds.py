"""What a value may be: a kind says it in words for messages and reads one raw value strictly, or explains what it expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.config.numerals import Mismatch, as_number

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


class Kind:
    """Base of the kinds; ``says`` is what stands in messages and in the reference page."""

    @property
    def says(self) -> str:
        raise NotImplementedError

    def read(self, value: object) -> Reading:
        """The inside form of ``value``; raises Mismatch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bool(Kind):
    """true or false; 0, 1 and strings are refused."""

    @property
    def says(self) -> str:
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
        raise Mismatch(self.says, f"Write {meant}." if meant else None)


@dataclass(frozen=True)
class Int(Kind):
    """A whole number in [low, high]; 5e8 is one. ``infinite`` lets Infinity stand for "never" and reads it as None."""

    low: int | None = None
    high: int | None = None
    unit: str = ""
    infinite: bool = False

    @property
    def says(self) -> str:
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
        number, warning = as_number(value, self.says)
        if self.infinite and number == math.inf:
            return Reading(None)
        if not math.isfinite(number) or number != int(number):
            raise Mismatch(self.says)
        whole = int(number)
        if (self.low is not None and whole < self.low) or (self.high is not None and whole > self.high):
            raise Mismatch(self.says)
        if warning:
            warning = f"'{value}' is a string in YAML 1.1. Write {whole}."
        return Reading(whole, warning)


@dataclass(frozen=True)
class Float(Kind):
    """A finite number; ``above`` is an exclusive lower bound, ``low`` and ``high`` are inclusive."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    @property
    def says(self) -> str:
        if self.above is not None:
            limit = "a positive number" if self.above == 0 else f"a number above {self.above:g}"
        elif self.low is not None:
            limit = "a number of at least 0" if self.low == 0 else f"a number of at least {self.low:g}"
        else:
            limit = "a number"
        return f"{limit}, at most {self.high:g}" if self.high is not None else limit

    def read(self, value: object) -> Reading:
        number, warning = as_number(value, self.says)
        fits = (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
        )
        if not fits:
            raise Mismatch(self.says)
        return Reading(float(number), warning)


@dataclass(frozen=True)
class Text(Kind):
    """A string, or one of ``choices`` in any case.

    ``synonyms`` are pairs of another word for a choice and that choice; ``starts`` are beginnings after which anything may stand.
    """

    choices: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        if not self.choices:
            return "a string"
        words = [*self.choices, *(f"{start}..." for start in self.starts)]
        return "one of " + ", ".join(f'"{word}"' for word in words)

    def read(self, value: object) -> Reading:
        if not isinstance(value, str):
            raise Mismatch(self.says)
        if not self.choices:
            return Reading(value)
        meant = {choice.lower(): choice for choice in self.choices}
        meant |= {word.lower(): choice for word, choice in self.synonyms}
        if value.lower() in meant:
            return Reading(meant[value.lower()])
        if value.lower().startswith(self.starts):
            return Reading(value)
        raise Mismatch(self.says)


@dataclass(frozen=True)
class DType(Kind):
    """A floating dtype by name; torch's and numpy's spellings are understood."""

    @property
    def says(self) -> str:
        return 'a dtype: "fp32", "fp16" or "bf16"'

    def read(self, value: object) -> Reading:
        name = DTYPES.get(value.lower()) if isinstance(value, str) else None
        if name is None:
            raise Mismatch(self.says)
        return Reading(name)


@dataclass(frozen=True)
class Names(Kind):
    """A list of strings; one string stands for a list of one. ``also`` are words allowed instead of a list."""

    also: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        return "a list of strings" + "".join(f', or "{word}"' for word in self.also)

    def read(self, value: object) -> Reading:
        if isinstance(value, str):
            return Reading((value,))
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return Reading(tuple(value))
        raise Mismatch(self.says)


@dataclass(frozen=True)
class Numbers(Kind):
    """A list of ``count`` numbers in [low, high), such as betas."""

    count: int | None = None
    low: float | None = None
    below: float | None = None

    @property
    def says(self) -> str:
        text = f"a list of {self.count} numbers" if self.count else "a list of numbers"
        if self.low is not None and self.below is not None:
            text += f", each at least {self.low:g} and below {self.below:g}"
        return text

    def read(self, value: object) -> Reading:
        if not isinstance(value, list | tuple) or (self.count is not None and len(value) != self.count):
            raise Mismatch(self.says)
        warnings = []
        numbers = []
        for item in value:
            number, warning = as_number(item, self.says)
            if (
                not math.isfinite(number)
                or (self.low is not None and number < self.low)
                or (self.below is not None and number >= self.below)
            ):
                raise Mismatch(self.says)
            numbers.append(float(number))
            warnings += [warning] if warning else []
        return Reading(tuple(numbers), " ".join(warnings) or None)


@dataclass(frozen=True)
class AnyOf(Kind):
    """The first kind that takes the value: a number or a list of numbers, say."""

    kinds: tuple[Kind, ...]

    @property
    def says(self) -> str:
        return ", or ".join(kind.says for kind in self.kinds)

    def read(self, value: object) -> Reading:
        for kind in self.kinds:
            try:
                return kind.read(value)
            except Mismatch:
                continue
        raise Mismatch(self.says)


@dataclass(frozen=True)
class Section(Kind):
    """An object whose keys have rows of their own. ``switch``: a bare true or false stands for the section with this key set."""

    switch: str | None = None

    @property
    def says(self) -> str:
        return "an object"

    def read(self, value: object) -> Reading:
        if not isinstance(value, Mapping):
            raise Mismatch(self.says)
        return Reading(value)


@dataclass(frozen=True)
class Opaque(Kind):
    """Anything at all, kept as it is: what stands inside is not looked at."""

    @property
    def says(self) -> str:
        return "any value"

    def read(self, value: object) -> Reading:
        return Reading(value)
