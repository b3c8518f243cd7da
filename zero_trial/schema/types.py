"""Types of values: each describes itself, reads a raw value strictly, and reports errors.

Two formats use these types. ds_config is lenient if the meaning is clear (5e8 is an integer, and so
is the string that YAML 1.1 reads, with a warning). An experiment is ``exact``: only JSON integers
are integers, because a Determined master reads the same text.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.schema.document import EXPONENT, shown, spell_float

Path = tuple[str | int, ...]  # keys and list indices from the root of a configuration

# The kinds of issues, for programs and tests.
TYPE, RANGE, CHOICE, UNKNOWN, MISSING = "type", "range", "choice", "unknown", "missing"
RULE, REMOVED, RENAMED = "rule", "removed", "renamed"  # contradictions; removed keys; read as another key
CLUSTER = "cluster"  # not supported on a cluster


@dataclass(frozen=True)
class Issue:
    """An error: its path, its kind (``code``), and a message."""

    path: Path
    code: str
    text: str

    def line(self, root: str) -> str:
        """Return ``<root>.searcher.bracket_rungs[0]: 0 is less than 1``."""
        return f"{root}{dotted(self.path)}: {self.text}"


def dotted(path: Path) -> str:
    """Return ``.searcher.bracket_rungs[0]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


class ValidationError(Exception):
    """A value does not have the required type.

    Args:
        expected: a description of valid values, such as "a positive integer".
        fix: what to write, if that is clear.
        text: the whole message ("3 is less than 5"); by default built from ``expected``.
        code: the code of the Issue.
    """

    def __init__(self, expected: str, fix: str | None = None, *, text: str = "", code: str = TYPE) -> None:
        super().__init__(expected)
        self.expected = expected
        self.fix = fix
        self.text = text
        self.code = code

    def fault(self, where: str, value: object) -> ConfigError:
        """Return the error for ``value`` at ``where``, with ``fix``."""
        return ConfigError("wrong value", where=where, got=shown(value), expected=self.expected, fix=self.fix)


def as_number(value: object, expected: str) -> tuple[int | float, str | None]:
    """Return a number unchanged; convert strings from YAML 1.1 ('1e-4'), with a warning. Raises
    ValidationError for anything else, including bools."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value, None
    if isinstance(value, str) and EXPONENT.fullmatch(value.strip()):
        number = float(value)
        if math.isfinite(number):
            return number, f"'{value}' is a string, read as a number. Write {spell_float(number)}."
    fix = None
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            fix = f"Write {value.strip()} without quotes."
    raise ValidationError(expected, fix)


def _number(value: object, expected: str, kind: str, exact: Any) -> tuple[int | float, str | None]:
    """Like ``as_number``; with ``exact``, accept only values of these types."""
    if exact and (isinstance(value, bool) or not isinstance(value, exact)):
        raise ValidationError(expected, text=f"{shown(value)} is not {kind}")
    return as_number(value, expected)


DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16", "torch.bfloat16": "bf16",
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """A value in its internal form, and a message for the user if it was interpreted."""

    value: Any
    warning: str | None = None


class Type:
    """The base class. A type implements ``read`` or ``check``; each defaults to using the other."""

    def describe(self) -> str:
        """Describe valid values, for messages and the reference page."""
        return "a value"

    def read(self, value: object) -> Reading:
        """Return the internal form of ``value``. Raises ValidationError."""
        for issue in self.check(value, ()):
            raise ValidationError(self.describe(), text=issue.text, code=issue.code)
        return Reading(value)

    def check(self, value: Any, path: Path) -> list[Issue]:
        """Return the issues of ``value`` at ``path``."""
        try:
            self.read(value)
        except ValidationError as error:
            return [Issue(path, error.code, error.text or f"{shown(value)} is not {error.expected}")]
        return []

    def fill(self, value: Any) -> Any:
        """Return ``value`` with the defaults of its sections. ``value`` must have no issues."""
        return value


_TRUTH = {**dict.fromkeys(("true", "yes", "on", "1"), "true"), **dict.fromkeys(("false", "no", "off", "0"), "false")}


@dataclass(frozen=True)
class Bool(Type):
    """true or false; rejects 0, 1 and strings."""

    def describe(self) -> str:
        return "true or false"

    def read(self, value: object) -> Reading:
        if isinstance(value, bool):
            return Reading(value)
        meant = _TRUTH.get(str(value).lower()) if isinstance(value, str | int) else None
        text = f"{shown(value)} is neither true nor false"
        raise ValidationError(self.describe(), f"Write {meant}." if meant else None, text=text)


@dataclass(frozen=True)
class Int(Type):
    """An integer in [low, high]; includes 5e8 unless ``exact``.

    ``infinite``: also accept Infinity ("never"), read as None.
    """

    low: int | None = None
    high: int | None = None
    unit: str = ""
    infinite: bool = False
    exact: bool = False

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
        number, warning = _number(value, self.describe(), "an integer", int if self.exact else None)
        if self.infinite and number == math.inf:
            return Reading(None)
        if not math.isfinite(number) or number != int(number):
            raise ValidationError(self.describe())
        whole = int(number)
        if self.low is not None and whole < self.low:
            raise ValidationError(self.describe(), text=f"{value} is less than {self.low}", code=RANGE)
        if self.high is not None and whole > self.high:
            raise ValidationError(self.describe(), text=f"{value} is more than {self.high}", code=RANGE)
        return Reading(whole, f"'{value}' is a string, read as a number. Write {whole}." if warning else None)


@dataclass(frozen=True)
class Float(Type):
    """A finite number; ``above`` is an exclusive lower bound, ``low`` and ``high`` are inclusive.

    ``exact``: reject strings, and do not convert integers to float.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    exact: bool = False

    def describe(self) -> str:
        if self.above is not None:
            limit = "a positive number" if self.above == 0 else f"a number above {self.above:g}"
        elif self.low is not None:
            limit = "a number of at least 0" if self.low == 0 else f"a number of at least {self.low:g}"
        else:
            limit = "a number"
        return f"{limit}, at most {self.high:g}" if self.high is not None else limit

    def read(self, value: object) -> Reading:
        number, warning = _number(value, self.describe(), "a number", (int, float) if self.exact else None)
        text = ""
        if not math.isfinite(number):
            text = f"{shown(value)} is not a number"
        elif self.above is not None and number <= self.above:
            text = f"{value} is not more than {self.above:g}"
        elif self.low is not None and number < self.low:
            text = f"{value} is less than {self.low:g}"
        elif self.high is not None and number > self.high:
            text = f"{value} is more than {self.high:g}"
        if text:
            raise ValidationError(self.describe(), text=text, code=RANGE if math.isfinite(number) else TYPE)
        return Reading(number if self.exact else float(number), warning)


@dataclass(frozen=True)
class Text(Type):
    """A string, or one of ``choices``, which match in any case unless ``exact``.

    Args:
        synonyms: pairs of a synonym and its choice.
        starts: prefixes that any text may follow.
        pattern: a regular expression that the text must contain; ``otherwise`` is the message if it
            does not.
    """

    choices: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()
    pattern: str = ""
    otherwise: str = ""
    exact: bool = False

    def describe(self) -> str:
        if not self.choices:
            return "a string"
        words = [*self.choices, *(f"{start}..." for start in self.starts)]
        return "one of " + ", ".join(f'"{word}"' for word in words)

    def read(self, value: object) -> Reading:
        if self.exact and self.choices:
            if isinstance(value, str) and value in self.choices:
                return Reading(value)
            text = f"{shown(value)} is not one of {', '.join(self.choices)}"
            raise ValidationError(self.describe(), text=text, code=CHOICE)
        if not isinstance(value, str):
            raise ValidationError(self.describe())
        if self.pattern and not re.search(self.pattern, value):
            raise ValidationError(self.describe(), text=self.otherwise, code=RULE)
        if not self.choices:
            return Reading(value)
        meant = {choice.lower(): choice for choice in self.choices}
        meant |= {word.lower(): choice for word, choice in self.synonyms}
        if value.lower() in meant:
            return Reading(meant[value.lower()])
        if value.lower().startswith(self.starts):
            return Reading(value)
        raise ValidationError(self.describe(), code=CHOICE)


@dataclass(frozen=True)
class DType(Type):
    """A floating-point dtype by name; accepts torch's and numpy's spellings."""

    def describe(self) -> str:
        return 'a dtype: "fp32", "fp16" or "bf16"'

    def read(self, value: object) -> Reading:
        name = DTYPES.get(value.lower()) if isinstance(value, str) else None
        if name is None:
            raise ValidationError(self.describe())
        return Reading(name)


@dataclass(frozen=True)
class Names(Type):
    """A list of strings; a single string becomes a list.

    ``also``: words that are valid instead of a list.
    """

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
    low: float = -math.inf
    below: float = math.inf

    def describe(self) -> str:
        text = f"a list of {self.count} numbers" if self.count else "a list of numbers"
        if self.low > -math.inf:
            text += f", each at least {self.low:g} and below {self.below:g}"
        return text

    def read(self, value: object) -> Reading:
        if not isinstance(value, list | tuple) or (self.count is not None and len(value) != self.count):
            raise ValidationError(self.describe())
        numbers, warnings = [], []
        for item in value:
            number, warning = as_number(item, self.describe())
            if not (math.isfinite(number) and self.low <= number < self.below):
                raise ValidationError(self.describe())
            numbers.append(float(number))
            warnings += [warning] if warning else []
        return Reading(tuple(numbers), " ".join(warnings) or None)


@dataclass(frozen=True)
class AnyOf(Type):
    """The first of ``kinds`` that accepts the value; ``otherwise`` is the message if none does."""

    kinds: tuple[Type, ...]
    otherwise: str = ""

    def describe(self) -> str:
        return ", or ".join(kind.describe() for kind in self.kinds)

    def read(self, value: object) -> Reading:
        for kind in self.kinds:
            try:
                return kind.read(value)
            except ValidationError:
                continue
        raise ValidationError(self.describe(), text=self.otherwise)

    def fill(self, value: Any) -> Any:
        found = next((kind for kind in self.kinds if not kind.check(value, ())), None)
        return value if found is None else found.fill(value)


@dataclass(frozen=True)
class Opaque(Type):
    """Any value, stored unchanged. The content is not checked."""

    def describe(self) -> str:
        return "any value"

    def read(self, value: object) -> Reading:
        return Reading(value)


@dataclass(frozen=True)
class MapOf(Type):
    """Any map; its values must have the type ``each``, if given."""

    each: Type | None = None

    def describe(self) -> str:
        return "an object"

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, Mapping):
            return not_a_map(value, path)
        if self.each is None:
            return []
        return [issue for key, inner in value.items() for issue in self.each.check(inner, (*path, key))]


@dataclass(frozen=True)
class Section(MapOf):
    """An object whose keys have their own rows.

    ``switch``: the key that a bare true or false in place of the section sets.
    """

    switch: str | None = None


@dataclass(frozen=True)
class ListOf(Type):
    """A list of ``item``."""

    item: Type

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, list):
            return [Issue(path, TYPE, f"{shown(value)} is not a list")]
        return [issue for index, inner in enumerate(value) for issue in self.item.check(inner, (*path, index))]

    def fill(self, value: Any) -> Any:
        return [self.item.fill(inner) for inner in value]


@dataclass(frozen=True)
class Forbidden(Type):
    """Not allowed in new configurations; ``why`` is the alternative."""

    why: str

    def check(self, value: Any, path: Path) -> list[Issue]:
        return [Issue(path, REMOVED, self.why)]


@dataclass(frozen=True)
class Field:
    """One key of a section: its type, its default, whether it is required, and whether a completed
    section shows its default (else the key is omitted)."""

    type: Type
    default: Any = None
    required: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Fields(Type):
    """A map with only these ``keys``; null means that a key is absent.

    Args:
        checks: functions of a section whose keys have no issues; each returns a message or None.
        hint: the message for an unknown key that is not similar to a known one.
        instead: the replacements of unknown keys, by name.
    """

    keys: Mapping[str, Field]
    checks: tuple[Callable[[Mapping[str, Any]], str | None], ...] = ()
    hint: str = field(default="", compare=False)
    instead: Mapping[str, str] = field(default_factory=dict, compare=False)

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, Mapping):
            return not_a_map(value, path)
        issues = [self._unknown(key, path) for key in value if key not in self.keys]
        for name, key in self.keys.items():
            inner = value.get(name)
            if inner is not None:
                issues += key.type.check(inner, (*path, name))
            elif key.required:
                issues.append(Issue((*path, name), MISSING, "is a required property"))
        if not issues:
            found = (check(value) for check in self.checks)
            issues += [Issue(path, RULE, text) for text in found if text]
        return issues

    def fill(self, value: Any) -> Any:
        filled: dict[str, Any] = {}
        for name, key in self.keys.items():
            inner = value.get(name)
            inner = copy.deepcopy(key.default) if inner is None else inner
            if key.shown or inner not in (key.default, None, []):
                filled[name] = None if inner is None else key.type.fill(inner)
        return filled

    def _unknown(self, key: Any, path: Path) -> Issue:
        near = difflib.get_close_matches(str(key), self.keys, 1, 0.7)
        hint = f'Did you mean "{near[0]}"?' if near else self.hint
        hint = f"Write {self.instead[key]}." if key in self.instead else hint
        return Issue((*path, key), UNKNOWN, f"unknown property. {hint}".rstrip())


@dataclass(frozen=True)
class Tagged(Type):
    """A section whose ``key`` selects one of ``kinds``.

    Args:
        otherwise: the message for an unknown tag.
        removed: tags that new configurations must not use, with replacements.
    """

    key: str
    kinds: Mapping[str, Fields]
    otherwise: str
    removed: Mapping[str, str] = field(default_factory=dict)

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, Mapping):
            return not_a_map(value, path)
        kind = value.get(self.key)
        if kind is None:
            return [Issue((*path, self.key), MISSING, "is a required property")]
        if not isinstance(kind, str) or kind not in self.kinds:
            removed = self.removed.get(kind) if isinstance(kind, str) else None
            if removed:
                return [Issue((*path, self.key), REMOVED, removed)]
            return [Issue(path, CHOICE, self.otherwise)]
        return self.kinds[kind].check(value, path)

    def fill(self, value: Any) -> Any:
        return self.kinds[value[self.key]].fill(value)


def exact_int(low: int = -(2**63), high: int = 2**63 - 1) -> Int:
    """Return the type of a 64-bit JSON integer."""
    return Int(low, high, exact=True)


exact_float = partial(Float, exact=True)  # a JSON number
exact_text = partial(Text, exact=True)  # a case-sensitive string


def not_a_map(value: Any, path: Path) -> list[Issue]:
    """Return the issue of a value that must be a map."""
    return [Issue(path, TYPE, f"{shown(value)} is not a map")]
