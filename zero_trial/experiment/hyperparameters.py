"""An experiment's hyperparameters as Determined reads them: bare values and consts are values, typed objects are ranges to search."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, Path, shown
from zero_trial.schema.document import shown as spelled_document
from zero_trial.schema.rules import Field, Fields, Number, Plain, Rule, TextRule, Whole, spelled

TYPES = ("int", "double", "log", "categorical", "const")


_NEEDS = {
    "int": ("minval", "maxval"),
    "double": ("minval", "maxval"),
    "log": ("minval", "maxval", "base"),
    "categorical": ("vals",),
    "const": ("val",),
}


_TAKES = {
    "int": ("minval", "maxval", "count"),
    "double": ("minval", "maxval", "count"),
    "log": ("minval", "maxval", "base", "count"),
    "categorical": ("vals",),
    "const": ("val",),
}


def read_hyperparameters(document: Document, faults: list[ConfigError]) -> Document:
    """``document`` (the section's content) with every const replaced by its value; ranges stay as they are.

    Faults are added to ``faults``: a nested key ``type`` that is no hyperparameter type, and ranges that miss or do not know a key.
    """
    places: dict[Path, Location] = {}

    def walk(value: Any, raw: Path, path: Path) -> Any:
        if path:
            places[path] = document.at(raw)
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if path and "type" in value:
            kind = value["type"]
            if not isinstance(kind, str) or kind not in TYPES:
                faults.append(_nested_type(document, raw, value))
                return copy.deepcopy(dict(value))
            _check_range(document, raw, value, faults)
            if kind == "const" and "val" in value:
                _keep_places(document, (*raw, "val"), path, places)
                return copy.deepcopy(value["val"])
            return copy.deepcopy(dict(value))
        return {str(key): walk(inner, (*raw, str(key)), (*path, str(key))) for key, inner in value.items()}

    resolved = walk(document.value, (), ())
    return Document(resolved, places, document.place)


def is_range(value: Any) -> bool:
    """Whether a resolved hyperparameter is still something to search over."""
    return isinstance(value, Mapping) and isinstance(value.get("type"), str) and value["type"] in TYPES[:4]


def ranges(section: Mapping[str, Any], above: Path = ()) -> list[str]:
    """Dotted names of all ranges in resolved hyperparameters."""
    found: list[str] = []
    for key, value in section.items():
        if is_range(value):
            found.append(".".join((*above, key)))
        elif isinstance(value, Mapping):
            found += ranges(value, (*above, key))
    return found


def _keep_places(document: Document, raw: Path, path: Path, places: dict[Path, Location]) -> None:
    for inner, place in document.places.items():
        if len(inner) > len(raw) and inner[: len(raw)] == raw:
            places[(*path, *inner[len(raw) :])] = place


def _nested_type(document: Document, raw: Path, value: Mapping[str, Any]) -> ConfigError:
    kind = value["type"]
    name = raw[-1]
    rest = ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items() if key != "type")
    whole = f"{name}: {{type: const, val: {{type: {kind}{', ' + rest if rest else ''}}}}}"
    in_ds_config = raw[:1] == ("ds_config",) and raw[1:] in (("optimizer",), ("scheduler",))
    fix = (
        f"Write {name}: {{type_: {kind}}}, or {whole}." if in_ds_config else f"Write {whole}, or another key than type."
    )
    return ConfigError(
        'a nested key "type" is read as the type of a hyperparameter',
        where=document.at((*raw, "type")).where(".".join((*raw, "type"))),
        got=shown(kind),
        expected=f"one of {', '.join(TYPES)}",
        fix=fix,
    )


def _check_range(document: Document, raw: Path, value: Mapping[str, Any], faults: list[ConfigError]) -> None:
    kind, dotted = value["type"], ".".join(raw)
    missing = [key for key in _NEEDS[kind] if key not in value]
    if missing:
        fix = f"Add {', '.join(missing)}."
        faults.append(
            ConfigError(
                f"a hyperparameter of type {kind} needs it",
                where=document.at(raw).where(f"{dotted}.{missing[0]}"),
                fix=fix,
            )
        )
    for key in value:
        if key != "type" and key not in _TAKES[kind]:
            where = document.at((*raw, str(key))).where(f"{dotted}.{key}")
            faults.append(ConfigError(f"type {kind} does not take it", where=where, expected=", ".join(_TAKES[kind])))
    low, high = value.get("minval"), value.get("maxval")
    if kind in ("int", "double", "log") and not missing:
        bad = [name for name in ("minval", "maxval") if not _is_number(value[name])]
        if bad:
            where = document.at((*raw, bad[0])).where(f"{dotted}.{bad[0]}")
            faults.append(ConfigError("not a number", where=where, got=shown(value[bad[0]])))
        elif _is_number(low) and _is_number(high) and low >= high:  # type: ignore[operator]
            where = document.at(raw).where(dotted)
            faults.append(ConfigError("minval is not below maxval", where=where, got=f"{low} and {high}"))
    if kind == "categorical" and not missing and (not isinstance(value["vals"], list) or not value["vals"]):
        where = document.at((*raw, "vals")).where(f"{dotted}.vals")
        faults.append(ConfigError("no values to choose from", where=where, got=shown(value["vals"]), expected="a list"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ``hyperparameters``: names with values, ranges, and maps of such; a nested key "type" always names a kind of range.


# The words are a real master's, missing quote included, because people look for them.
NESTED_TYPE = (
    'if a hyperparameter object\'s ["type"] is set, it must be one of "int", "double", "log", const", or "categorical"'
)


NO_COUNT = "grid search is in use but count was not provided"


_NOT_A_BATCH_SIZE = "is neither a positive integer nor an int hyperparameter"


class _Anything(Plain):
    """Any JSON value, null too."""

    def check(self, value: Any, path: str) -> list[str]:
        return []


class _Values(Plain):
    """A list of at least one value."""

    def check(self, value: Any, path: str) -> list[str]:
        return [] if isinstance(value, list) and value else [f"{path}: {spelled(value)} is not a list of values"]


def _ascending(section: Mapping[str, Any]) -> str | None:
    return None if section["minval"] < section["maxval"] else "minval must be less than maxval"


def _finite(section: Mapping[str, Any]) -> str | None:
    """Whether every value between the ends is a number that JSON can hold."""
    try:
        ends = [float(section.get("base", 1)) ** float(section[name]) for name in ("minval", "maxval")]
    except (OverflowError, ZeroDivisionError):
        return "base to the power of minval or maxval is no finite number"
    width = float(section["maxval"]) - float(section["minval"])
    return None if all(math.isfinite(value) for value in (*ends, width)) else "the range is not finite"


def _range(kind: str, bound: Rule, **more: Field) -> Fields:
    keys = {
        "type": Field(TextRule((kind,)), required=True),
        "minval": Field(bound, required=True),
        "maxval": Field(bound, required=True),
        "count": Field(Whole(1)),
        **more,
    }
    return Fields(keys, (_ascending, _finite))


RANGES: Mapping[str, Fields] = {
    "int": _range("int", Whole()),
    "double": _range("double", Number()),
    "log": _range("log", Number(), base=Field(Number(above=0), required=True)),
    "categorical": Fields(
        {"type": Field(TextRule(("categorical",)), required=True), "vals": Field(_Values(), required=True)},
    ),
    "const": Fields({"type": Field(TextRule(("const",)), required=True), "val": Field(_Anything())}),
}


COUNTED = ("int", "double", "log")


class Hyperparameters(Plain):
    """The whole section. Nothing is filled in: what is written is what is sampled."""

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, Mapping):
            return [f"{path}: {spelled(value)} is not a map"]
        faults = []
        for name, inner in value.items():
            found = list(_check(inner, f"{path}.{name}", (str(name),)))
            if name == "global_batch_size" and inner is not None and not found:
                found = _check_batch_size(inner, f"{path}.{name}")
            faults += found
        return faults


def _check(value: Any, path: str, names: tuple[str, ...]) -> Iterator[str]:
    if isinstance(
        value, list
    ):  # a list is one value; what a master looks for inside it has changed, so we look for all of it
        for index, inner in enumerate(value):
            yield from _check(inner, f"{path}[{index}]", names)
    if not isinstance(value, Mapping):
        return
    if "type" not in value:
        for name, inner in value.items():
            yield from _check(inner, f"{path}.{name}", (*names, str(name)))
        return
    kind = value["type"]
    if not isinstance(kind, str) or kind not in RANGES:
        yield f"{path}: {NESTED_TYPE}"
        yield f"{path}: {accepted_form(value, names)}"
    elif kind == "const" and "val" not in value:
        yield f"{path}.val: is a required property"
    else:
        yield from RANGES[kind].check(value, path)


def accepted_form(value: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """How a map with a key "type" of its own is to be written."""
    inside = ", ".join(f"{key}: {spelled_document(inner)}" for key, inner in sorted(value.items(), key=_type_first))
    const = f"{names[-1]}: {{type: const, val: {{{inside}}}}}"
    start = 'a nested key "type" names a kind of hyperparameter here.'
    if names in (("ds_config", "optimizer"), ("ds_config", "scheduler")) and isinstance(value["type"], str):
        return f"{start} Write {names[-1]}: {{type_: {value['type']}, ...}} for ds_config's type, or {const}"
    return f"{start} Write {const}"


def _type_first(item: tuple[str, Any]) -> bool:
    return item[0] != "type"


def _check_batch_size(value: Any, path: str) -> list[str]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    candidates = {
        "int": lambda: [value["minval"]],
        "const": lambda: [value["val"]],
        "categorical": lambda: list(value["vals"]),
    }
    sizes = candidates[kind]() if kind in candidates else [value]
    good = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    return [] if good else [f"{path}: {_NOT_A_BATCH_SIZE}"]


def check_counts(value: Any, path: str) -> list[str]:
    """Ranges of a grid that do not say how many values to take; maps and lists are looked into."""
    if isinstance(value, list):
        return [fault for index, inner in enumerate(value) for fault in check_counts(inner, f"{path}[{index}]")]
    if not isinstance(value, Mapping):
        return []
    kind = value.get("type")
    if isinstance(kind, str):
        return [f"{path}: {NO_COUNT}"] if kind in COUNTED and value.get("count") is None else []
    return [fault for name, inner in value.items() for fault in check_counts(inner, f"{path}.{name}")]
