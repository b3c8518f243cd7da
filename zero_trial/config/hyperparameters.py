"""An experiment's hyperparameters as Determined reads them: bare values and consts are values, typed objects are ranges to search."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zero_trial.config.canonical import shown
from zero_trial.config.document import Document, Path, Place
from zero_trial.errors import ConfigError

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
    places: dict[Path, Place] = {}

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


def _keep_places(document: Document, raw: Path, path: Path, places: dict[Path, Place]) -> None:
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
