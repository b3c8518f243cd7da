"""What a checkpoint holds, by name: parameters with their optimizer state, buffers and tied names.

Reads the manifest alone, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.checkpoint.format import (
    Manifest,
    TensorEntry,
    TensorKind,
    is_floating,
    natural_order,
    parse_stored_name,
)


@dataclass(frozen=True)
class StoredTensor:
    """A stored parameter or buffer.

    Attributes:
        name: as the model has it.
        stored: its name in the manifest.
        lives: the dtype in which the model computes with it; None where the checkpoint does not
            say.
        states: its optimizer state: name -> dtype.
    """

    name: str
    stored: str
    entry: TensorEntry
    lives: str | None
    part: int = 0
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_master(self) -> bool:
        """Return whether what is stored is not what the model computes with."""
        return self.lives is not None and self.lives != self.entry.dtype


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds, by name.

    Attributes:
        aliases: tied name -> the name that is stored.
        parts: more than 1 where the model is parallel itself; then names repeat.
    """

    params: tuple[StoredTensor, ...]
    buffers: tuple[StoredTensor, ...]
    aliases: Mapping[str, str]
    parts: int
    state: Mapping[str, Any]

    @property
    def elements(self) -> int:
        return sum(param.entry.numel for param in self.params)

    @property
    def without_frozen(self) -> bool:
        """Return whether frozen parameters were left out when it was saved
        (``exclude_frozen_parameters``): the model is not whole here."""
        return self.state.get("without_frozen") is True

    def in_part(self, part: int) -> tuple[StoredTensor, ...]:
        """List parameters, then buffers."""
        return tuple(held for held in (*self.params, *self.buffers) if held.part == part)


def take_inventory(manifest: Manifest) -> Inventory:
    """List what the manifest holds, by name, numbers as numbers. Nothing else is read."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    aliases = state.get("aliases")
    states: dict[tuple[int, str], dict[str, str]] = {}
    found: dict[TensorKind, list[StoredTensor]] = {TensorKind.PARAM: [], TensorKind.BUFFER: []}
    named = sorted(
        ((parse_stored_name(name), name) for name in manifest.tensors),
        key=lambda pair: (pair[0].part, natural_order(pair[0].name)),
    )
    for meaning, stored in named:
        if meaning.kind is TensorKind.STATE:
            states.setdefault((meaning.part, meaning.name), {})[meaning.state] = manifest.tensors[stored].dtype
    for meaning, stored in named:
        if meaning.kind in found:
            entry = manifest.tensors[stored]
            lives = _lives(state, meaning.name, entry) if meaning.kind is TensorKind.PARAM else entry.dtype
            own = states.get((meaning.part, meaning.name), {}) if meaning.kind is TensorKind.PARAM else {}
            found[meaning.kind].append(
                StoredTensor(meaning.name, stored, entry, lives, meaning.part, dict(sorted(own.items())))
            )
    return Inventory(
        tuple(found[TensorKind.PARAM]),
        tuple(found[TensorKind.BUFFER]),
        dict(aliases) if isinstance(aliases, dict) else {},
        max((meaning.parts for meaning, _ in named), default=1),
        state,
    )


def _lives(state: Mapping[str, Any], name: str, entry: TensorEntry) -> str | None:
    """Return the noted dtype; older checkpoints have only the ds_config, which names it where it
    asks for 16 bits."""
    if not is_floating(entry.dtype):
        return entry.dtype
    noted = state.get("dtypes")
    if isinstance(noted, dict):
        return str(noted.get(name, "float32"))
    config = state.get("ds_config")
    if not isinstance(config, dict):
        return None
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if isinstance(config.get(section), dict) and config[section].get("enabled") is True:
            return dtype
    return entry.dtype
