"""A configuration as read: nested dicts and lists, with file and line of every key."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from zero_trial.errors import ConfigError

Path = tuple[str, ...]

MOST_LEVELS = 64  # of nesting, in dicts and files
MOST_VALUES = 100_000


class Provenance(Enum):
    """The origin of a configuration value. An enum value is the prefix of its text in reports."""

    DEFAULT = "default"
    AUTO = "auto: "  # "auto", filled in
    OPEN = "auto: left"  # "auto", left to zero_trial
    HYPERPARAMETER = "hyperparameter"  # used if the file does not set the key
    DERIVED = "derived"  # from other values: batch arithmetic, sizes of the mesh
    REWRITTEN = "written as"  # an older spelling of the key
    OVERLAY = "hyperparameters.ds_config"  # laid over the file
    MODEL = "PipelineModule"  # set by the model
    GIVEN = ""  # a file, or a dict that was passed in


class ValueSource(str):
    """The source of a value: text for reports, and the provenance for code."""

    provenance: Provenance

    def __new__(cls, text: str, provenance: Provenance | None = None) -> ValueSource:
        """Create a source; by default, derive ``provenance`` from the text (of a JSON report)."""
        made = super().__new__(cls, text)
        made.provenance = provenance if provenance is not None else _provenance_of(text)
        return made

    @property
    def is_default(self) -> bool:
        """Return whether the value is the key's default."""
        return self.provenance is Provenance.DEFAULT

    @property
    def is_given(self) -> bool:
        """Return whether the user wrote this value, in a file, an overlay, a dict or the model."""
        return self.provenance in (Provenance.GIVEN, Provenance.OVERLAY, Provenance.MODEL)


_OVERLAYS = (Provenance.OVERLAY.value, "hyperparameters.overwrite_deepspeed_args")


def _provenance_of(text: str) -> Provenance:
    """Return the provenance of a text from a report.

    In ``ds_config.json:3 hyperparameters.ds_config`` the suffix is the provenance.
    """
    if text.endswith(_OVERLAYS):
        return Provenance.OVERLAY
    order = sorted(Provenance, key=lambda each: -len(each.value))
    return next(each for each in order if text.startswith(each.value))


DEFAULT = ValueSource("default", Provenance.DEFAULT)
GIVEN = ValueSource("given", Provenance.GIVEN)


@dataclass(frozen=True)
class Location:
    """The location of a value: file and line, the dotted prefix of a ds_config inside another file,
    and a note about the value's source."""

    file: str | None = None
    line: int | None = None
    prefix: str = ""
    note: str = ""
    provenance: Provenance = Provenance.GIVEN

    def spot(self) -> str:
        """Return ``const.yaml:14``, or "" for a dict argument."""
        if self.file is None:
            return ""
        return f"{self.file}:{self.line}" if self.line else self.file

    def where(self, dotted: str) -> str:
        """Return the beginning of an error message: ``const.yaml:14
        hyperparameters.ds_config.zero_optimization.stage``."""
        full = f"{self.prefix}.{dotted}" if self.prefix else dotted
        return f"{self.spot()} {full}".strip()

    def noted(self, note: str, provenance: Provenance) -> Location:
        """Return the same location with a note about the value's source."""
        return replace(self, note=note, provenance=provenance)

    def source(self) -> ValueSource:
        """Return the source for reports: ``ds_config.json:14``, ``auto: hyperparameter lr``, or
        ``given`` for a plain dict."""
        spot = self.spot()
        if self.prefix and spot:
            spot = f"{spot} {self.prefix}"
        if self.note:
            return ValueSource(f"{self.note} ({spot})" if spot else self.note, self.provenance)
        overlay = Provenance.OVERLAY if self.prefix in _OVERLAYS else self.provenance
        return ValueSource(spot or GIVEN, overlay)


@dataclass(frozen=True)
class Document:
    """``value`` with locations in ``places`` by key path; a path without an entry has the location
    of its nearest parent.

    ``warnings``: messages about values that had to be interpreted. ``respelled``: the original
    spelling of keys that YAML reads as a boolean or a number, by the path with the resulting key
    (``true`` for ``on``).
    """

    value: dict[str, Any]
    places: Mapping[Path, Location] = field(default_factory=dict)
    place: Location = Location()
    warnings: tuple[str, ...] = ()
    respelled: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def of(cls, mapping: Mapping[str, Any], place: Location | None = None) -> Document:
        """Return a deep copy of a plain mapping. Raises ConfigError if it is nested too deep."""
        place = place or Location()
        _require_finite(mapping, place)
        return cls(copy.deepcopy(dict(mapping)), {}, place)

    def at(self, path: Path) -> Location:
        """Return the location of ``path``, or of its nearest parent."""
        for end in range(len(path), 0, -1):
            found = self.places.get(path[:end])
            if found is not None:
                return found
        return self.place

    def where(self, key: str) -> str:
        """Return the beginning of an error message about the dotted ``key``."""
        return self.at(tuple(key.split("."))).where(key)

    def get(self, path: Path, default: Any = None) -> Any:
        """Return the value at ``path``, or ``default`` if there is none."""
        value: Any = self.value
        for part in path:
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def with_value(self, path: Path, value: Any, place: Location) -> Document:
        """Return a new document with ``value`` at ``path``; create missing sections."""
        top = copy.deepcopy(self.value)
        section = top
        for part in path[:-1]:
            inner = section.get(part)
            if not isinstance(inner, dict):
                inner = section[part] = {}
            section = inner
        section[path[-1]] = value
        return replace(self, value=top, places={**self.places, path: place})

    def below(self, path: Path, prefix: str | None = None) -> Document:
        """Return the section at ``path`` as a separate document; its errors start with ``prefix``
        (default: the dotted path)."""
        dotted = ".".join(path) if prefix is None else prefix
        section = self.get(path)
        places = {rest: replace(place, prefix=dotted) for rest, place in self.inside(path)}
        value = copy.deepcopy(dict(section)) if isinstance(section, Mapping) else {}
        return Document(value, places, replace(self.at(path), prefix=dotted))

    def inside(self, path: Path) -> Iterator[tuple[Path, Location]]:
        """Yield relative path and location of every key inside the section at ``path``."""
        for inner, place in self.places.items():
            if len(inner) > len(path) and inner[: len(path)] == path:
                yield inner[len(path) :], place


def twice(file: str, path: Path, first: int | None, second: int) -> ConfigError:
    """Return the error for a duplicate key in an object, with both lines."""
    return ConfigError(
        "duplicate key",
        where=f"{file}:{second} {'.'.join(path)}",
        got=f"it on line {first} and line {second}",
        fix="Remove one of them.",
    )


def _require_finite(mapping: Mapping[str, Any], place: Location) -> None:
    """Raise ConfigError if ``mapping`` is too large or too deep, or contains itself."""
    stack: list[tuple[Any, Path]] = [(mapping, ())]
    values = 0
    while stack:
        value, path = stack.pop()
        values += 1
        if len(path) > MOST_LEVELS or values > MOST_VALUES:
            raise ConfigError(
                "too deeply nested or too large",
                where=place.where(".".join(path[:4])),
                expected=f"at most {MOST_LEVELS} levels and {MOST_VALUES} values",
            )
        if isinstance(value, Mapping):
            stack += [(item, (*path, str(key))) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            stack += [(item, (*path, f"[{number}]")) for number, item in enumerate(value)]


def shown(value: Any) -> str:
    """Return a value as in a file, shortened for a message."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(inner) for inner in value) + "]"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Strings in YAML 1.1 that people mean as numbers: an exponent without a dot or a sign (1e-4, 5e8,
# 1.0e4).
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def spell_float(number: float) -> str:
    """Return a float that JSON and YAML 1.1 both read as a number."""
    text = repr(number)
    if "e" not in text:
        return text if abs(number) >= 1e-3 or number == 0 else _scientific(f"{number:e}")
    return _scientific(text)


def _scientific(text: str) -> str:
    mantissa, exponent = text.split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"
