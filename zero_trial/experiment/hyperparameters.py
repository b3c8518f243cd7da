"""``hyperparameters``: names with values, ranges to search, and maps of such; a nested key "type"
names a kind of range.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, shown
from zero_trial.schema.types import (
    CLUSTER,
    MISSING,
    RULE,
    TYPE,
    Field,
    Fields,
    Issue,
    Opaque,
    Path,
    Type,
    dotted,
    exact_float,
    exact_int,
    exact_text,
    not_a_map,
)

_SEARCHED = ("int", "double", "log", "categorical")
Names = tuple[str, ...]


def read_hyperparameters(document: Document) -> Document:
    """Return ``document`` (the section's content) with every const replaced by its value; ranges
    stay as written.
    """
    places: dict[Names, Location] = {}

    def walk(value: Any, raw: Names, path: Names) -> Any:
        if path:
            places[path] = document.at(raw)
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if path and is_const(value) and "val" in value:
            places.update({(*path, *rest): place for rest, place in document.inside((*raw, "val"))})
            return copy.deepcopy(value["val"])
        if path and "type" in value:
            return copy.deepcopy(dict(value))
        return {str(key): walk(inner, (*raw, str(key)), (*path, str(key))) for key, inner in value.items()}

    return Document(walk(document.value, (), ()), places, document.place)


def located(issue: Issue, document: Document) -> ConfigError:
    """Return the issue as an error with the file and line of its key in ``document``."""
    place = document.at(tuple(str(step) for step in issue.path if not isinstance(step, int)))
    where = place.where(dotted(issue.path).removeprefix(".")) if issue.path else place.spot()
    return ConfigError(issue.text, where=where or None)


def is_range(value: Any) -> bool:
    """Return True for a resolved hyperparameter that is still something to search over."""
    return isinstance(value, Mapping) and isinstance(value.get("type"), str) and value["type"] in _SEARCHED


def is_const(spec: Any) -> bool:
    """Return whether ``spec`` is written ``{type: const, val: ...}``."""
    return isinstance(spec, Mapping) and spec.get("type") == "const"


def find_ranges(section: Mapping[str, Any], above: Names = ()) -> Iterator[tuple[Names, Mapping[str, Any]]]:
    """Yield path and spec of every range, in the order of the YAML."""
    for key, value in section.items():
        if is_range(value):
            yield (*above, key), value
        elif isinstance(value, Mapping) and not is_const(value):
            yield from find_ranges(value, (*above, key))


def ranges(section: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of all ranges."""
    return [".".join(path) for path, _ in find_ranges(section)]


# The words are a real master's, missing quote included, because people look for them.
NESTED_TYPE = (
    'if a hyperparameter object\'s ["type"] is set, it must be one of "int", "double", "log", const", or "categorical"'
)

NO_COUNT = "grid search is in use but count was not provided"


class _Values(Type):
    """A list of at least one value."""

    def check(self, value: Any, path: Path) -> list[Issue]:
        good = isinstance(value, list) and value
        return [] if good else [Issue(path, TYPE, f"{shown(value)} is not a list of values")]


def _ascending(section: Mapping[str, Any]) -> str | None:
    return None if section["minval"] < section["maxval"] else "minval must be less than maxval"


def _finite(section: Mapping[str, Any]) -> str | None:
    """Return what is wrong if a value between the ends is not a number that JSON can hold."""
    try:
        ends = [float(section.get("base", 1)) ** float(section[name]) for name in ("minval", "maxval")]
    except (OverflowError, ZeroDivisionError):
        return "base to the power of minval or maxval is not a finite number"
    width = float(section["maxval"]) - float(section["minval"])
    return None if all(math.isfinite(value) for value in (*ends, width)) else "the range is not finite"


def _range(kind: str, bound: Type, **more: Field) -> Fields:
    keys = {
        "type": Field(exact_text((kind,)), required=True),
        "minval": Field(bound, required=True),
        "maxval": Field(bound, required=True),
        "count": Field(exact_int(1), shown=False),
        **more,
    }
    return Fields(keys, (_ascending, _finite))


_RANGES: Mapping[str, Fields] = {
    "int": _range("int", exact_int()),
    "double": _range("double", exact_float()),
    "log": _range("log", exact_float(), base=Field(exact_float(above=0), required=True)),
    "categorical": Fields(
        {"type": Field(exact_text(("categorical",)), required=True), "vals": Field(_Values(), required=True)},
    ),
    "const": Fields({"type": Field(exact_text(("const",)), required=True), "val": Field(Opaque())}),
}

COUNTED = ("int", "double", "log")


class Hyperparameters(Type):
    """The whole section. A completed one has ``{type: const, val: ...}`` for every plain value."""

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, Mapping):
            return not_a_map(value, path)
        return [fault for name, inner in value.items() for fault in _check(inner, (*path, name), (str(name),))]

    def fill(self, value: Any) -> Any:
        return {name: _fill(inner) for name, inner in value.items()}


def _fill(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return {"type": "const", "val": copy.deepcopy(value)}
    if "type" in value:
        return _RANGES[value["type"]].fill(value)
    return {name: _fill(inner) for name, inner in value.items()}


def _check(value: Any, path: Path, names: tuple[str, ...]) -> Iterator[Issue]:
    if not isinstance(value, Mapping):  # a list is one value, whatever is in it
        return
    if "type" not in value:
        for name, inner in value.items():
            yield from _check(inner, (*path, name), (*names, str(name)))
        return
    kind = value["type"]
    if not isinstance(kind, str) or kind not in _RANGES:
        text = f'a nested key "type" names a kind of hyperparameter here ({NESTED_TYPE}). '
        yield Issue(path, RULE, f"{text}Write {_accepted_form(value, names)}")
    else:
        yield from _check_range(value, path)


def _check_range(value: Mapping[str, Any], path: Path) -> list[Issue]:
    """Return the issues of a range; ``value["type"]`` is one of the known kinds."""
    if value["type"] == "const" and "val" not in value:
        return [Issue((*path, "val"), MISSING, "is a required property")]
    return _RANGES[value["type"]].check(value, path)


def _accepted_form(value: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return how a map with a key "type" of its own is to be written."""
    inside = ", ".join(
        f"{key}: {shown(inner)}" for key, inner in sorted(value.items(), key=lambda item: item[0] != "type")
    )
    const = f"{names[-1]}: {{type: const, val: {{{inside}}}}}"
    if names in (("ds_config", "optimizer"), ("ds_config", "scheduler")) and isinstance(value["type"], str):
        const = f"{names[-1]}: {{type_: {value['type']}, ...}} for ds_config's type, or {const}"
    return const


def check_counts(value: Any, path: Path) -> list[Issue]:
    """Return ranges of a grid that do not say how many values to take; maps and lists are looked
    into.
    """
    if isinstance(value, list):
        return [fault for index, inner in enumerate(value) for fault in check_counts(inner, (*path, index))]
    if not isinstance(value, Mapping):
        return []
    kind = value.get("type")
    if isinstance(kind, str):
        return [Issue(path, CLUSTER, NO_COUNT)] if kind in COUNTED and value.get("count") is None else []
    return [fault for name, inner in value.items() for fault in check_counts(inner, (*path, name))]
