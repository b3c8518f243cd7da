"""Keys of a ds_config that zero_trial reads and checks, and does not act on: rows of the table from
``inert_keys.json``.

The file maps a section ("" at the top) to its keys. Each has a ``type`` with the arguments of its
class in schema/types.py, what zero_trial does with it ("no effect", "no effect yet" or "refused")
and why, and where needed ``default``, ``instead``, ``aliases``, ``harmless`` and ``origin``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from zero_trial.ds_config.key import Key, Origin, Support
from zero_trial.schema.types import Bool, DType, Float, Int, Names, Opaque, Text, Type

_TYPES: Mapping[str, type[Type]] = {
    "any": Opaque,
    "bool": Bool,
    "dtype": DType,
    "float": Float,
    "int": Int,
    "names": Names,
    "text": Text,
}
_OF_KEY = {field.name for field in fields(Key)}


def inert_keys(section: str) -> list[Key]:
    """Return the rows of a section, in the file's order."""
    return [_row(f"{section}.{name}" if section else name, entry) for name, entry in _KEYS.get(section, {}).items()]


def _row(path: str, entry: Mapping[str, Any]) -> Key:
    (support,) = [each for each in Support if each.value in entry]
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    meaning, kind = given.pop(support.value), _TYPES[given.pop("type")]
    own = {name: given.pop(name) for name in sorted(_OF_KEY & given.keys())}
    origin = Origin(own.pop("origin", Origin.DEEPSPEED.value))
    return Key(path, kind(**given), support, meaning, origin=origin, **own)


_KEYS: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
