"""Lay one configuration over another, nested or dotted, leaf by leaf, and track the source of every
changed leaf. Also presets: named ``zero_optimization`` sections from
``zero_trial/ds_config/presets``."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from zero_trial.ds_config.table import lookup
from zero_trial.errors import ConfigError
from zero_trial.schema.config_source import Source, open_source, read_json
from zero_trial.schema.document import Document, Location, Path, shown
from zero_trial.util.text import did_you_mean

# Keys for which "type_" also means "type", because Determined's master reads a nested key "type" as
# the kind of a hyperparameter.
_TYPES = (("optimizer", "type_"), ("scheduler", "type_"))

TRAINER = "trainer"
"""The hyperparameter that names a preset."""


def named_ds_config(data: Mapping[str, Any] | None, hparams: Mapping[str, Any]) -> tuple[Path, Any]:
    """Return the ds_config that an experiment names and the path of its key: ``data.ds_config``,
    else the hyperparameter ``deepspeed_config``, else ``ds_config`` unless it is a dict of
    overrides; ``((), None)`` if the experiment names none."""
    over = hparams.get("ds_config")
    candidates = (
        (("data", "ds_config"), (data or {}).get("ds_config")),
        (("hyperparameters", "deepspeed_config"), hparams.get("deepspeed_config")),
        (("hyperparameters", "ds_config"), None if isinstance(over, Mapping) else over),
    )
    return next(((path, value) for path, value in candidates if value is not None), ((), None))


def needs_no_base(hparams: Mapping[str, Any]) -> bool:
    """Return whether hyperparameters alone are a ds_config: a dict of overrides, or a preset."""
    return isinstance(hparams.get("ds_config"), Mapping) or hparams.get(TRAINER) is not None


def with_hyperparameters(
    base: Document, hparams: Mapping[str, Any], *, own: bool = False, places: Document | None = None
) -> Document:
    """Return ``base`` with the changes from a trial's hyperparameters. Raises ConfigError.

    The sections of the preset in ``trainer`` replace whole sections of the base. Then
    ``overwrite_deepspeed_args`` (the name in Determined's examples) and ``ds_config`` are laid over
    the result if they are dicts.

    Args:
        own: skip Determined's name, because the trial's own code lays it over its file.
        places: has the source of each hyperparameter.
    """
    places = places or Document({}, place=Location(prefix="hyperparameters"))
    if (name := hparams.get(TRAINER)) is not None:
        preset = read_preset(name, places.at((TRAINER,)).where(TRAINER))
        kept = {path: place for path, place in base.places.items() if path[0] not in preset.value}
        base = replace(base, value={**base.value, **preset.value}, places={**kept, **preset.places})
    for name in ("ds_config",) if own else ("overwrite_deepspeed_args", "ds_config"):
        if isinstance(over := hparams.get(name), Mapping):
            known = places.below((name,), f"hyperparameters.{name}")
            base = overlay(base, replace(known, value=Document.of(over).value))
    return base


def overwrite_ds_config(base: Source, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict: ``base`` (dict, path or base64) with ``overrides`` laid over it, nested or
    dotted ("optimizer.params.lr").

    ``optimizer.type_`` means ``optimizer.type``. Replaces lists, merges sections, and removes a key
    if its value is None. Changes nothing in place. Raises ConfigError if a key is given twice, or
    if a section would replace a plain value or vice versa.
    """
    return overlay(open_source(base), Document.of(overrides)).value


def overlay(base: Document, over: Document) -> Document:
    """Return ``base`` with every leaf of ``over``, replacing other spellings of its keys."""
    faults: list[ConfigError] = []
    changes, origins = _expand(over, faults)
    value, places = copy.deepcopy(base.value), dict(base.places)
    for path, leaf in changes.items():
        try:
            _set(value, path, leaf, origins[path].where(".".join(path)))
        except ConfigError as fault:
            faults.append(fault)
        # sections above the leaf keep their source in the base
        new = {path[:end]: origins[path[:end]] for end in range(1, len(path)) if path[:end] in origins}
        places = {**new, **places, path: origins[path]}
    if faults:
        raise ConfigError.many(faults)
    return Document(value, places, base.place, (*base.warnings, *over.warnings))


def _expand(over: Document, faults: list[ConfigError]) -> tuple[dict[Path, Any], dict[Path, Location]]:
    """Return every leaf of ``over`` by its full path, and the source of each."""
    found: dict[Path, Any] = {}
    places: dict[Path, Location] = {}

    def walk(section: Mapping[str, Any], raw: Path, path: Path) -> None:
        for key, value in section.items():
            raw_path = (*raw, str(key))
            parts = (*path, *str(key).split("."))
            parts = (parts[0], "type") if parts in _TYPES else parts
            if isinstance(value, Mapping) and value and not _opaque(parts):
                places.setdefault(parts, over.at(raw_path))
                walk(value, raw_path, parts)
            elif parts in found:
                where = over.at(raw_path).where(".".join(parts))
                faults.append(ConfigError("set twice in the overrides", where=where, fix="Keep one of them."))
            else:
                found[parts], places[parts] = value, over.at(raw_path)

    walk(over.value, (), ())
    for path in found:
        for end in range(1, len(path)):
            if path[:end] in found:
                where = places[path].where(".".join(path))
                faults.append(
                    ConfigError(
                        f"also set inside {'.'.join(path[:end])}, which is overridden as a whole",
                        where=where,
                        fix="Keep one of them.",
                    )
                )
    return found, places


def _opaque(path: Path) -> bool:
    row = lookup(".".join(path[:-1]), path[-1])
    return row is not None and not row.is_section and not row.path.endswith(".params")


def _set(value: dict[str, Any], path: Path, leaf: Any, where: str) -> None:
    """Set the leaf of ``path``, using the spelling of its sections in ``value``. Raises ConfigError
    if a plain value would replace a section (and lose its contents), or a section a plain value (a
    mistake)."""
    section = value
    for depth, part in enumerate(path[:-1], 1):
        inner = section.setdefault(next(_spellings(section, path[:depth]), part), {})
        if not isinstance(inner, dict):
            dotted = ".".join(path[:depth])
            raise ConfigError(
                f"{dotted} is not a section in the base",
                where=where,
                got=shown(inner),
                expected="an object into which this key can be merged",
                fix=f"Remove {dotted} from the base, or write it as a section there.",
            )
        section = inner
    name = path[-1]
    for other in list(_spellings(section, path)):
        if other != name:
            del section[other]
    before = section.get(name)
    if isinstance(before, Mapping) and before and leaf is not None and not isinstance(leaf, Mapping) and leaf != "auto":
        raise ConfigError(
            "this value would replace a section of the base",
            where=where,
            got=shown(leaf),
            expected=f"an object with some of {', '.join(map(str, before))}",
            fix="Write the keys that change, or null to remove the section.",
        )
    if isinstance(leaf, Mapping) and leaf and before is not None and not isinstance(before, Mapping):
        raise ConfigError(
            "this section would replace a plain value of the base",
            where=where,
            got=shown(leaf),
            expected=f"a value like {shown(before)}",
        )
    if leaf is None:
        section.pop(name, None)
    elif leaf != {} or not isinstance(before, Mapping):  # an empty section changes nothing
        section[name] = copy.deepcopy(leaf)


def _spellings(section: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield the spellings in ``section`` of the last key of ``path``."""
    parent, name = ".".join(path[:-1]), path[-1]
    row = lookup(parent, name)
    return (key for key in section if row is not None and lookup(parent, key) is row)


# --- presets --------------------------------------------------------------------------------------

_PRESETS = pathlib.Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def read_preset(name: Any, where: str) -> Document:
    """Return the preset ``name`` as a ds_config. If there is no such preset, raises ConfigError for
    the key ``where``, with the nearest name."""
    known = preset_names()
    if not isinstance(name, str) or name not in known:
        near = did_you_mean(name, known) if isinstance(name, str) else None
        raise ConfigError(
            "there is no such preset",
            where=where,
            got=repr(name),
            expected=", ".join(known),
            fix=near or "Write one of these names, or put the section itself into hyperparameters.ds_config.",
        )
    return read_json((_PRESETS / f"{name}.json").read_text(encoding="utf-8"), f"preset {name}")
