"""The table of every known ds_config key: the one place from which checks, hints, the report and the reference page are derived.

To change what a key does here, change ``answer`` in its row.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from zero_trial.ds_config.key import Key
from zero_trial.ds_config.keys_legacy import LEGACY
from zero_trial.ds_config.keys_running import RUNNING
from zero_trial.ds_config.keys_training import TRAINING
from zero_trial.ds_config.keys_zero import ZERO
from zero_trial.ds_config.params import OPTIMIZERS, SCHEDULERS
from zero_trial.ds_config.sections import DsConfig
from zero_trial.schema.types import Section

REPORT_FIELDS = frozenset({"sources", "warnings", "raw"})  # fields of DsConfig that are not keys


def section_class(hint: Any) -> Any:
    """The dataclass in a field's type, through ``| None``; None for plain values."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def field_defaults(cls: Any = DsConfig, prefix: str = "") -> dict[str, Any]:
    """Dotted path of every field of the frozen dataclasses, sections included, to its default; the default of a section is None."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if cls is DsConfig and item.name in REPORT_FIELDS:
            continue
        path = f"{prefix}{item.name}"
        inner = section_class(hints[item.name])
        if inner is not None:
            found[path] = None
            found.update(field_defaults(inner, f"{path}."))
        elif item.default is not dataclasses.MISSING:
            found[path] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            found[path] = item.default_factory()
        else:
            found[path] = None
    return found


def _assemble() -> Mapping[str, Key]:
    fields = field_defaults()
    rows: dict[str, Key] = {}
    for row in (*TRAINING, *ZERO, *RUNNING, *LEGACY):
        rows[row.path] = dataclasses.replace(row, default=fields[row.path]) if row.path in fields else row
    return types.MappingProxyType(rows)


TABLE: Mapping[str, Key] = _assemble()
FIELDS: frozenset[str] = frozenset(field_defaults())


def _spellings() -> dict[str, dict[str, Key]]:
    """Parent path -> every spelling that is valid in it -> row."""
    found: dict[str, dict[str, Key]] = {"": {}}
    for row in TABLE.values():
        if isinstance(row.kind, Section):
            found.setdefault(row.path, {})
        for name in (row.name, *row.aliases):
            found.setdefault(row.parent, {})[name] = row
    return found


_SPELLINGS = _spellings()


def lookup(parent: str, name: str) -> Key | None:
    """The row of a key by any of its spellings, in the section ``parent`` ("" at the top)."""
    return _SPELLINGS.get(parent, {}).get(name)


def nearest(parent: str, name: str) -> str | None:
    """What was probably meant: the closest spelling in the same section, or the dotted path of the key in another one."""
    here = _SPELLINGS.get(parent, {})
    close = difflib.get_close_matches(name, sorted(here), 1, 0.7)
    if close:
        return close[0]
    if parent in ("", "optimizer", "scheduler"):
        owner = "scheduler" if parent == "scheduler" else "optimizer"
        known = (OPTIMIZERS if owner == "optimizer" else SCHEDULERS).values()
        if any(name in named.params for named in known):
            return f"{owner}.params.{name}"
    for other, spellings in _SPELLINGS.items():
        if name in spellings:
            return f"{other}.{name}" if other else f"{name} (at the top level)"
    for other, spellings in _SPELLINGS.items():
        close = difflib.get_close_matches(name, sorted(spellings), 1, 0.85)
        if close:
            return f"{other}.{close[0]}" if other else close[0]
    close = difflib.get_close_matches(name, sorted(here), 1, 0.55)
    return close[0] if close else None
