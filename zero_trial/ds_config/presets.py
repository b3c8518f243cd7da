"""Presets: ``zero_optimization`` by one word, from the files of ``zero_trial/presets``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document
from zero_trial.schema.json_source import read_json
from zero_trial.util.text import did_you_mean

HYPERPARAMETER = "trainer"
"""The hyperparameter that names a preset."""

_FOLDER = Path(__file__).parent.parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def read_preset(name: Any, where: str) -> Document:
    """Return the preset ``name`` as a ds_config. Raises ConfigError, with the nearest name, for any
    other value at the key ``where``."""
    known = preset_names()
    if not isinstance(name, str) or name not in known:
        near = did_you_mean(name, known) if isinstance(name, str) else None
        raise ConfigError(
            "there is no such preset",
            where=where,
            got=repr(name),
            expected=", ".join(known),
            fix=near or "Write one of these names, or the section itself into hyperparameters.ds_config.",
        )
    return read_json((_FOLDER / f"{name}.json").read_text(encoding="utf-8"), f"preset {name}")


def with_preset(base: Document, hparams: Mapping[str, Any], where: str | None = None) -> Document:
    """Return ``base`` with the sections of the preset that ``hyperparameters.trainer`` names in the
    place of its own, whole: no key of the base's ``zero_optimization`` stays. ``base`` itself where
    no preset is named.

    Args:
        where: the place of the hyperparameter, for errors.
    """
    name = hparams.get(HYPERPARAMETER)
    if name is None:
        return base
    preset = read_preset(name, where or f"hyperparameters.{HYPERPARAMETER}")
    places = {path: place for path, place in base.places.items() if path[0] not in preset.value}
    return Document({**base.value, **preset.value}, {**places, **preset.places}, base.place, base.warnings)
