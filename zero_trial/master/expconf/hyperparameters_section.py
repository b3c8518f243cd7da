"""``hyperparameters``: names with values, ranges, and maps of such; a nested key "type" always names a kind of range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from zero_trial.config.canonical import shown as spelled
from zero_trial.master.expconf.rules import Key, Number, Plain, Rule, Section, Text, Whole, shown

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
        return [] if isinstance(value, list) and value else [f"{path}: {shown(value)} is not a list of values"]


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


def _range(kind: str, bound: Rule, **more: Key) -> Section:
    keys = {
        "type": Key(Text((kind,)), required=True),
        "minval": Key(bound, required=True),
        "maxval": Key(bound, required=True),
        "count": Key(Whole(1)),
        **more,
    }
    return Section(keys, (_ascending, _finite))


RANGES: Mapping[str, Section] = {
    "int": _range("int", Whole()),
    "double": _range("double", Number()),
    "log": _range("log", Number(), base=Key(Number(above=0), required=True)),
    "categorical": Section(
        {"type": Key(Text(("categorical",)), required=True), "vals": Key(_Values(), required=True)},
    ),
    "const": Section({"type": Key(Text(("const",)), required=True), "val": Key(_Anything())}),
}
COUNTED = ("int", "double", "log")


class Hyperparameters(Plain):
    """The whole section. Nothing is filled in: what is written is what is sampled."""

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, Mapping):
            return [f"{path}: {shown(value)} is not a map"]
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
    inside = ", ".join(f"{key}: {spelled(inner)}" for key, inner in sorted(value.items(), key=_type_first))
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
