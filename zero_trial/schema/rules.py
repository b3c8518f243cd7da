"""What a value of an experiment configuration may be: rules that find its faults and fill in what it does not say.

A rule's ``check`` gives one line per fault, in the form ``<config>.section.key: what is wrong``. ``fill`` may be called on a value without
faults only. In a section, null means that the key was not written.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Rule(Protocol):
    """What one value may be."""

    def check(self, value: Any, path: str) -> list[str]:
        """The faults of ``value``, which stands at ``path``."""
        ...

    def fill(self, value: Any) -> Any:
        """``value`` with the defaults inside it."""
        ...


def spelled(value: Any) -> str:
    """A value in a message: short, on one line."""
    text = '"' + value + '"' if isinstance(value, str) else str(value)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Plain:
    """A rule for a value without anything inside it."""

    def fill(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class TextRule(Plain):
    """A string; one of ``choices`` if there are any; in which ``pattern`` is found, or ``otherwise`` is what is wrong."""

    choices: tuple[str, ...] = ()
    pattern: str = ""
    otherwise: str = ""

    def check(self, value: Any, path: str) -> list[str]:
        if self.choices:
            good = isinstance(value, str) and value in self.choices
            return [] if good else [f"{path}: {spelled(value)} is not one of {', '.join(self.choices)}"]
        if not isinstance(value, str):
            return [f"{path}: {spelled(value)} is not a string"]
        return [f"{path}: {self.otherwise}"] if self.pattern and not re.search(self.pattern, value) else []


@dataclass(frozen=True)
class Whole(Plain):
    """An integer from ``low`` to ``high``; 64 bits."""

    low: int = -(2**63)
    high: int = 2**63 - 1

    def check(self, value: Any, path: str) -> list[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            return [f"{path}: {spelled(value)} is not an integer"]
        if value < self.low:
            return [f"{path}: {value} is less than {self.low}"]
        return [f"{path}: {value} is more than {self.high}"] if value > self.high else []


@dataclass(frozen=True)
class Number(Plain):
    """A finite number, above ``above`` or at least ``low`` where they are given."""

    above: float | None = None
    low: float | None = None

    def check(self, value: Any, path: str) -> list[str]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return [f"{path}: {spelled(value)} is not a number"]
        if self.above is not None and value <= self.above:
            return [f"{path}: {value} is not more than {self.above:g}"]
        return [f"{path}: {value} is less than {self.low:g}"] if self.low is not None and value < self.low else []


@dataclass(frozen=True)
class Flag(Plain):
    """true or false."""

    def check(self, value: Any, path: str) -> list[str]:
        return [] if isinstance(value, bool) else [f"{path}: {spelled(value)} is neither true nor false"]


@dataclass(frozen=True)
class MapOf(Plain):
    """Any map; its values are of ``each``, if that is given."""

    each: Rule | None = None

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, Mapping):
            return [f"{path}: {spelled(value)} is not a map"]
        if self.each is None:
            return []
        return [fault for key, inner in value.items() for fault in self.each.check(inner, f"{path}.{key}")]


@dataclass(frozen=True)
class Forbidden(Plain):
    """What no new experiment may hold; ``why`` says what to write instead."""

    why: str

    def check(self, value: Any, path: str) -> list[str]:
        return [f"{path}: {self.why}"]


@dataclass(frozen=True)
class ListOf:
    """A list of ``item``."""

    item: Rule

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, list):
            return [f"{path}: {spelled(value)} is not a list"]
        return [fault for index, inner in enumerate(value) for fault in self.item.check(inner, f"{path}[{index}]")]

    def fill(self, value: Any) -> Any:
        return [self.item.fill(inner) for inner in value]


@dataclass(frozen=True)
class OneOf:
    """One of several rules; none of them: ``otherwise``."""

    rules: tuple[Rule, ...]
    otherwise: str

    def check(self, value: Any, path: str) -> list[str]:
        return [] if self._fitting(value) is not None else [f"{path}: {self.otherwise}"]

    def fill(self, value: Any) -> Any:
        rule = self._fitting(value)
        return value if rule is None else rule.fill(value)

    def _fitting(self, value: Any) -> Rule | None:
        return next((rule for rule in self.rules if not rule.check(value, "")), None)


@dataclass(frozen=True)
class Field:
    """One key of a section. A default is filled in where the key is not written; ``required`` keys have to be, at the latest by the cluster."""

    rule: Rule
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Fields:
    """A map with these ``keys`` and no others. ``checks`` look at a section whose keys are all well and say what is wrong with them together."""

    keys: Mapping[str, Field]
    checks: tuple[Callable[[Mapping[str, Any]], str | None], ...] = ()
    hint: str = field(default="", compare=False)

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, Mapping):
            return [f"{path}: {spelled(value)} is not a map"]
        faults = [self._unknown(key, path) for key in value if key not in self.keys]
        for name, key in self.keys.items():
            inner = value.get(name)
            if inner is not None:
                faults += key.rule.check(inner, f"{path}.{name}")
            elif key.required:
                faults.append(f"{path}.{name}: is a required property")
        if not faults:
            found = (check(value) for check in self.checks)
            faults += [f"{path}: {fault}" for fault in found if fault]
        return faults

    def fill(self, value: Any) -> Any:
        filled: dict[str, Any] = {}
        for name, key in self.keys.items():
            inner = value.get(name)
            inner = copy.deepcopy(key.default) if inner is None else inner
            filled[name] = None if inner is None else key.rule.fill(inner)
        return filled

    def _unknown(self, key: Any, path: str) -> str:
        near = difflib.get_close_matches(str(key), self.keys, 1, 0.7)
        hint = f' Did you mean "{near[0]}"?' if near else (f" {self.hint}" if self.hint else "")
        return f"{path}.{key}: unknown property.{hint}"


@dataclass(frozen=True)
class Tagged:
    """A section whose ``key`` says which of ``kinds`` it is. ``gone``: kinds that no new experiment may be, and what to write instead."""

    key: str
    kinds: Mapping[str, Fields]
    otherwise: str
    gone: Mapping[str, str] = field(default_factory=dict)

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, Mapping):
            return [f"{path}: {spelled(value)} is not a map"]
        kind = value.get(self.key)
        if kind is None:
            return [f"{path}.{self.key}: is a required property"]
        if not isinstance(kind, str) or kind not in self.kinds:
            gone = self.gone.get(kind) if isinstance(kind, str) else None
            return [f"{path}.{self.key}: {gone}" if gone else f"{path}: {self.otherwise}"]
        return self.kinds[kind].check(value, path)

    def fill(self, value: Any) -> Any:
        return self.kinds[value[self.key]].fill(value)
