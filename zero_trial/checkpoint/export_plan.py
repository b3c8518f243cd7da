"""Which tensors an export writes, in which dtype, into which file: decided before anything is read. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch

from zero_trial.checkpoint.dtypes import dtype_name, dtype_of
from zero_trial.checkpoint.inventory import Held, Inventory
from zero_trial.errors import CheckpointError, ConfigError


class Weights(Enum):
    """``MASTERS``: what the optimizer updates, where that is something of its own. ``MODEL``: what forward computes with."""

    MASTERS = "masters"
    MODEL = "model"


@dataclass(frozen=True)
class Item:
    """One tensor of the export. Its elements go from ``stored``'s dtype through ``through`` to ``dtype``."""

    name: str
    stored: str
    shape: tuple[int, ...]
    through: torch.dtype
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExportPlan:
    """``shards``: the files' tensors, in the order in which they lie in them. ``aliases``: tied names, which are not written again."""

    shards: tuple[tuple[Item, ...], ...]
    aliases: Mapping[str, str]
    took: str

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for shard in self.shards for item in shard)

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


def plan_export(
    inventory: Inventory,
    *,
    weights: Weights = Weights.MASTERS,
    dtype: torch.dtype | None = None,
    part: int | None = None,
    shard_bytes: int | None = None,
    where: str = "export",
) -> ExportPlan:
    """``dtype``: of all floating tensors; None leaves each as it is. ``shard_bytes``: a file holds at most so much, or one tensor.

    Raises ConfigError for a model of several parallel parts unless one ``part`` is named, CheckpointError where there is nothing to write.
    """
    chosen = inventory.in_part(_part(inventory, part, where))
    if not chosen:
        raise CheckpointError("there are no weights in this checkpoint", where=where)
    items = [_item(held, weights, dtype) for held in chosen]
    names = {item.name for item in items}
    aliases = {alias: name for alias, name in inventory.aliases.items() if name in names and alias not in names}
    params = [held for held in chosen if held in inventory.params]
    missing = "; frozen parameters were left out when it was saved" if inventory.without_frozen else ""
    return ExportPlan(_cut(items, shard_bytes), aliases, _took(params, weights) + missing)


def _part(inventory: Inventory, part: int | None, where: str) -> int:
    if part is None and inventory.parts > 1:
        raise ConfigError(
            "the model is parallel itself: its parts have the same names, and only its own code knows how it has cut them",
            where=where,
            got=f"{inventory.parts} parts",
            fix=f"Export each by itself: --part 0 to --part {inventory.parts - 1}.",
        )
    if part is not None and not 0 <= part < inventory.parts:
        raise ConfigError(
            "there is no such part of the model",
            where="--part",
            got=part,
            expected=f"0 to {inventory.parts - 1}" if inventory.parts > 1 else "none: the model is in one piece",
        )
    return part or 0


def _item(held: Held, weights: Weights, dtype: torch.dtype | None) -> Item:
    stored = dtype_of(held.entry.dtype)
    through = dtype_of(held.lives) if weights is Weights.MODEL and held.lives is not None else stored
    final = dtype if dtype is not None and stored.is_floating_point else through
    return Item(held.name, held.stored, held.entry.shape, through, final)


def _cut(items: Iterable[Item], limit: int | None) -> tuple[tuple[Item, ...], ...]:
    """In the model's order as long as a file has room. Within a file wide dtypes come first, so that every tensor begins at a multiple of
    its element's size."""
    shards: list[list[Item]] = [[]]
    room = limit
    for item in items:
        if limit is not None and room is not None:
            if shards[-1] and item.bytes > room:
                shards.append([])
                room = limit
            room -= item.bytes
        shards[-1].append(item)
    return tuple(tuple(sorted(shard, key=lambda item: -item.dtype.itemsize)) for shard in shards)


def _took(params: Iterable[Held], weights: Weights) -> str:
    """Which of two sets of weights these are, in words."""
    listed = list(params)
    masters = [held for held in listed if held.is_master]
    unknown = [held for held in listed if held.lives is None]
    if masters and weights is Weights.MASTERS:
        kinds = _kinds(held.entry.dtype for held in masters)
        return f"{kinds} masters of {len(masters)} of {len(listed)} parameters; the model computes in {_kinds(held.lives for held in masters)}"
    if masters:
        return f"weights as the model computes with them, {_kinds(held.lives for held in listed)}, rounded from their masters"
    note = "; the checkpoint does not say in which dtype the model computes" if unknown else ""
    return f"weights as they are stored, {_kinds(held.entry.dtype for held in listed)}; there are no masters beside them{note}"


def _kinds(names: Iterable[str | None]) -> str:
    return ", ".join(name for name, _ in Counter(name for name in names if name).most_common()) or "none"


def exported_dtype(word: str) -> torch.dtype | None:
    """``keep``, ``fp32``, ``bf16``, ``fp16`` or torch's name."""
    short = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if word in short:
        return short[word]
    raise ConfigError("not a dtype of an export", where="--dtype", got=word, expected=", ".join(short))


def describe_dtypes(items: Iterable[Item]) -> str:
    """``float32, int64``, most frequent first."""
    return _kinds(dtype_name(item.dtype) for item in items)
