"""The whole ds_config: DsConfig, and the table of every known key.

The checks, the hints, the report and the reference page are derived from the table. Its rows are
declared in ``keys_training``, ``keys_zero`` and ``keys_running``, or listed in ``inert_keys.json``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero_trial.ds_config.key import DECLARED, Key, Origin, Support
from zero_trial.ds_config.keys_running import RunningKeys
from zero_trial.ds_config.keys_training import OPTIMIZERS, SCHEDULERS, TrainingKeys
from zero_trial.ds_config.keys_zero import ZeroKeys
from zero_trial.schema import types
from zero_trial.schema.document import DEFAULT, ValueSource


# The keys of the last base are first in the table.
@dataclass(frozen=True)
class DsConfig(RunningKeys, ZeroKeys, TrainingKeys):
    """A complete, checked ds_config with the defaults of DeepSpeed 0.19.8.

    Buckets, thresholds and limits are numbers of elements, not bytes; dtypes are the strings
    "fp32", "fp16", "bf16". None means that the user did not set the key and the component decides.
    Batch sizes are as given (``solve_batch`` completes them).

    Args:
        sources: dotted key -> the source of its value.
        warnings: messages to show to the user once.
        raw: the checked input with canonical key names; reading it returns an equal DsConfig.
    """

    sources: Mapping[str, ValueSource] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    def source(self, key: str) -> ValueSource:
        """Return the source of the value of a dotted key."""
        return self.sources.get(key, DEFAULT)

    # Like DeepSpeed's ``engine.config``, the dict that the user wrote: only keys of the input.

    def __getitem__(self, key: str) -> Any:
        return self.raw[key]

    def __contains__(self, key: object) -> bool:
        return key in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def keys(self) -> KeysView[str]:
        """Return the top-level keys of the input."""
        return self.raw.keys()

    def items(self) -> ItemsView[str, Any]:
        """Return the top-level keys of the input, with their values."""
        return self.raw.items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a top-level key of the input, else ``default``."""
        return self.raw.get(key, default)

    @property
    def precision(self) -> str:
        """Return "fp16", "bf16" or "fp32", the precision in which the model computes."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"


# Keys that zero_trial reads and checks but does not use. ``inert_keys.json`` maps a section ("" at
# the top) to its keys. Each key has a ``type`` (a class of schema/types.py) with arguments, its
# support ("no effect", "no effect yet" or "refused") with the reason, and optionally ``default``,
# ``instead``, ``aliases``, ``harmless`` and ``origin``.
_OF_KEY = {item.name for item in dataclasses.fields(Key)}


def _inert(path: str, entry: Mapping[str, Any]) -> Key:
    (support,) = [each for each in Support if each.value in entry]
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    meaning, kind = given.pop(support.value), getattr(types, given.pop("type"))
    own = {name: given.pop(name) for name in sorted(_OF_KEY & given.keys())}
    origin = Origin(own.pop("origin", Origin.DEEPSPEED.value))
    return Key(path, kind(**given), support, meaning, origin=origin, **own)


_INERT: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    Path(__file__).with_name("inert_keys.json").read_text(encoding="utf-8")
)


def _inert_rows(parent: str) -> Iterator[Key]:
    for name, entry in _INERT.get(parent, {}).items():
        path = f"{parent}.{name}" if parent else name
        yield _inert(path, entry)
        yield from _inert_rows(path)


def _rows(cls: Any, parent: str = "", kept: bool = True) -> Iterator[tuple[Key, bool]]:
    """Yield the rows of ``cls`` and of its sections: first the declared keys, then the inert ones.
    Each row comes with a bool: whether DsConfig stores its value."""
    fields = {item.name for item in dataclasses.fields(cls)} if kept else set()
    # dataclasses.fields omits the ClassVars
    for name, declared in cls.__dataclass_fields__.items():
        row = declared.metadata.get(DECLARED)
        if row is not None:
            path = f"{parent}.{name}" if parent else name
            yield dataclasses.replace(row, path=path), name in fields
            if row.section is not None:
                yield from _rows(row.section, path, name in fields)
    yield from ((row, False) for row in _inert_rows(parent))


_ROWS = list(_rows(DsConfig))
TABLE: Mapping[str, Key] = MappingProxyType({row.path: row for row, _ in _ROWS})
FIELDS: frozenset[str] = frozenset(row.path for row, kept in _ROWS if kept)
"""Keys whose values DsConfig keeps."""


def _spellings() -> dict[str, dict[str, Key]]:
    """Return parent path -> every valid spelling in that section -> row."""
    found: dict[str, dict[str, Key]] = {"": {}}
    for row in TABLE.values():
        if row.is_section:
            found.setdefault(row.path, {})
        for name in (row.name, *row.aliases):
            found.setdefault(row.parent, {})[name] = row
    return found


_SPELLINGS = _spellings()


def walk(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Key | None, Any]]:
    """Yield path, row and value of every key, sections before their contents. Includes the
    arguments of the optimizer and the scheduler, whose row is None."""
    for key, value in section.items():
        path = (*above, key)
        row = TABLE.get(".".join(path))
        yield path, row, value
        if isinstance(value, Mapping) and (row is None or row.is_section or row.name == "params"):
            yield from walk(value, path)


def lookup(parent: str, name: str) -> Key | None:
    """Return the row of a key in the section ``parent`` ("" at the top), by any spelling."""
    return _SPELLINGS.get(parent, {}).get(name)


def nearest(parent: str, name: str) -> str | None:
    """Return the closest spelling in the section, or a path in another section."""
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
