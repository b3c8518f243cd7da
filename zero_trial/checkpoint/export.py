"""Export a checkpoint's weights as safetensors files that any program can read.

    OUT.safetensors                         one file, if OUT is named like one
    OUT/model.safetensors                   one file in a folder, if everything fits into a shard
    OUT/model-00001-of-00003.safetensors    several, with model.safetensors.index.json, in Hugging
                                            Face's layout

Memory: a few chunks of 16 MiB, whatever the sizes of tensors and shards. Tied weights are written
once, with the other names in the metadata; ``safetensors.torch.load_model`` and ``from_pretrained``
tie them again. Dtypes are names, as in the manifest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path

import torch

from zero_trial.checkpoint.folder import Inventory, StoredTensor
from zero_trial.checkpoint.format import (
    Slice,
    check_dtype,
    dtype_of,
    is_floating,
    item_bytes,
    safetensors_header,
    tensor_bytes,
)
from zero_trial.checkpoint.range_reader import FILE, INDEX, CheckpointReader, Progress
from zero_trial.checkpoint.writer import DurableFiles
from zero_trial.errors import CheckpointError, ConfigError

# The plan: which tensors are written, in which dtype, into which file. Decided before anything is
# read.


class WeightSource(Enum):
    """Which values of a weight to export: its master in the optimizer if there is one, the values
    that forward uses, or the moving average of the master (ds_config's ``ema``)."""

    MASTERS = "masters"
    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True)
class ExportItem:
    """One tensor of the export. Cast from ``held`` via ``through`` to ``dtype``."""

    name: str
    stored: str
    shape: tuple[int, ...]
    held: str
    through: str
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * item_bytes(self.dtype)


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes.

    Attributes:
        shards: the tensors of each file, in their order there.
        aliases: tied names, which are not written again.
        took: the kind of weights, for messages.
    """

    shards: tuple[tuple[ExportItem, ...], ...]
    aliases: Mapping[str, str]
    took: str

    @property
    def items(self) -> tuple[ExportItem, ...]:
        return tuple(item for shard in self.shards for item in shard)

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


def plan_export(
    inventory: Inventory,
    *,
    weights: WeightSource = WeightSource.MASTERS,
    dtype: str | None = None,
    part: int | None = None,
    shard_bytes: int | None = None,
    where: str = "export",
) -> ExportPlan:
    """Plan the files of an export.

    Args:
        dtype: of all floating-point tensors; None keeps each dtype.
        shard_bytes: most bytes of a file, unless it holds a single tensor.

    Raises ConfigError for a model of several parallel parts unless one ``part`` is named,
    CheckpointError if there is nothing to write.
    """
    chosen = inventory.in_part(_part(inventory, part, where))
    if not chosen:
        raise CheckpointError("this checkpoint contains no weights", where=where)
    averaged = [held for held in chosen if "ema" in held.states and inventory.state.get("ema") is not None]
    if weights is WeightSource.EMA and not averaged:
        raise CheckpointError(
            "this checkpoint contains no averages of the weights",
            where=where,
            fix='"ema" in ds_config keeps them from the first step on. To export the weights, omit --ema.',
        )
    items = [_item(held, weights, dtype) for held in chosen]
    names = {item.name for item in items}
    aliases = {alias: name for alias, name in inventory.aliases.items() if name in names and alias not in names}
    params = [held for held in chosen if held in inventory.params]
    missing = "; frozen parameters were left out when it was saved" if inventory.without_frozen else ""
    return ExportPlan(_cut(items, shard_bytes), aliases, _took(params, weights) + missing)


def _part(inventory: Inventory, part: int | None, where: str) -> int:
    if part is None and inventory.parts > 1:
        raise ConfigError(
            "the model is parallel itself: its parts have the same names, and only its own code knows how the weights are split",
            where=where,
            got=f"{inventory.parts} parts",
            fix=f"Export each part separately: --part 0 to --part {inventory.parts - 1}.",
        )
    if part is not None and not 0 <= part < inventory.parts:
        raise ConfigError(
            "the model has no such part",
            where="--part",
            got=part,
            expected=f"0 to {inventory.parts - 1}" if inventory.parts > 1 else "none: the model has only one part",
        )
    return part or 0


def _item(held: StoredTensor, weights: WeightSource, dtype: str | None) -> ExportItem:
    stored = check_dtype(held.entry.dtype)
    through = check_dtype(held.lives) if weights is WeightSource.MODEL and held.lives is not None else stored
    source = held.stored
    if weights is WeightSource.EMA and "ema" in held.states:  # an untrained tensor is its own average
        source = source.removesuffix(f"param/{held.name}") + f"state/ema/{held.name}"
        stored = through = check_dtype(held.states["ema"])
    final = dtype if dtype is not None and is_floating(stored) else through
    return ExportItem(held.name, source, held.entry.shape, stored, through, final)


def _cut(items: Iterable[ExportItem], limit: int | None) -> tuple[tuple[ExportItem, ...], ...]:
    """Fill files in the model's order up to ``limit`` bytes. In each file, wide dtypes come first,
    so that every tensor begins at a multiple of its element's size."""
    shards: list[list[ExportItem]] = [[]]
    room = limit
    for item in items:
        if limit is not None and room is not None:
            if shards[-1] and item.bytes > room:
                shards.append([])
                room = limit
            room -= item.bytes
        shards[-1].append(item)
    return tuple(tuple(sorted(shard, key=lambda item: -item_bytes(item.dtype))) for shard in shards)


def _took(params: Iterable[StoredTensor], weights: WeightSource) -> str:
    """Return the text for the kind of weights."""
    listed = list(params)
    masters = [held for held in listed if held.is_master]
    unknown = [held for held in listed if held.lives is None]
    if weights is WeightSource.EMA:
        averages = [held.states["ema"] for held in listed if "ema" in held.states]
        rest = "; the others are not trained" if len(averages) < len(listed) else ""
        return f"averages of {len(averages)} of {len(listed)} parameters, {kinds_text(averages)}{rest}"
    if masters and weights is WeightSource.MASTERS:
        kinds = kinds_text(held.entry.dtype for held in masters)
        return f"{kinds} masters of {len(masters)} of {len(listed)} parameters; the model computes in {kinds_text(held.lives for held in masters)}"
    if masters:
        return f"weights in the dtype that the model computes with, {kinds_text(held.lives for held in listed)}, rounded from their masters"
    note = "; the checkpoint does not say in which dtype the model computes" if unknown else ""
    return f"weights as stored, {kinds_text(held.entry.dtype for held in listed)}; the checkpoint has no masters{note}"


def kinds_text(names: Iterable[str | None]) -> str:
    """Format as ``float32, int64``, most frequent first."""
    return ", ".join(name for name, _ in Counter(name for name in names if name).most_common()) or "none"


# The export itself: streamed, and either complete or absent.

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Exported:
    """The files that were written.

    Attributes:
        files: the index last.
        overflowed: by tensor, the number of finite values that its new dtype cannot hold.
    """

    files: dict[Path, int]  # bytes
    overflowed: dict[str, int] = field(default_factory=dict)


def file_names(out: Path, shards: int) -> list[Path]:
    """Name the shards' files, and the index if there are several. Raises ConfigError if one of them
    exists, or something else that prevents writing them."""
    if out.suffix == SUFFIX:
        if shards > 1:
            raise ConfigError(
                "a single file cannot have several shards",
                where="OUT",
                got=f"{out}, {shards} shards",
                fix="Pass a folder, or omit --shard-size.",
            )
        paths, folder = [out], out.parent
    elif shards == 1:
        paths, folder = [out / FILE], out
    else:
        paths = [out / f"model-{number:05d}-of-{shards:05d}{SUFFIX}" for number in range(1, shards + 1)] + [out / INDEX]
        folder = out
    if folder.exists() and not folder.is_dir():
        raise ConfigError("this is a file", where="OUT", got=str(folder), expected="a folder, or a new *.safetensors")
    in_the_way = [out] if out in paths else [*sorted(folder.glob(f"model*{SUFFIX}")), folder / INDEX]
    taken = [path for path in in_the_way if path.exists()]
    if taken:
        raise ConfigError(
            "the folder already contains weights",
            where="OUT",
            got=str(taken[0]),
            fix="Use another folder, or remove them.",
        )
    return paths


CHUNK_BYTES = 1 << 24


def write_export(reader: CheckpointReader, plan: ExportPlan, out: Path, progress: Progress | None = None) -> Exported:
    """Write every file under a temporary name and rename all at the end, the index last.

    Raises ConfigError and CheckpointError, and then leaves no files behind. ``progress`` gets the
    bytes as they are written.
    """
    paths = file_names(out, len(plan.shards))
    folder, disk, overflowed = paths[0].parent, DurableFiles(), Counter[str]()
    parts = [path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths]
    with ExitStack() as undo:
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
            for part in parts:
                undo.callback(part.unlink, missing_ok=True)
            for part, shard in zip(parts, plan.shards, strict=False):
                disk.write(part, _shard_chunks(reader, shard, plan, overflowed, progress))
            if len(paths) > len(plan.shards):
                files = zip(paths, plan.shards, strict=False)
                places = {item.name: path.name for path, shard in files for item in shard}
                index = {"metadata": {"total_size": plan.bytes}, "weight_map": places}
                disk.write(parts[-1], [json.dumps(index, indent=2).encode() + b"\n"])
            for part, path in zip(parts, paths, strict=True):
                disk.rename(part, path)
                undo.callback(path.unlink, missing_ok=True)
            disk.sync_folder(folder)
        except OSError as fault:
            raise CheckpointError(
                "the export could not be written", where=str(fault.filename or out), got=fault.strerror or fault
            ) from fault
        undo.pop_all()
    return Exported({path: path.stat().st_size for path in paths}, dict(overflowed))


def _shard_chunks(
    reader: CheckpointReader,
    shard: Sequence[ExportItem],
    plan: ExportPlan,
    overflowed: Counter[str],
    progress: Progress | None,
) -> Iterator[bytes | memoryview]:
    names = {item.name for item in shard}
    tied = {f"alias:{alias}": name for alias, name in plan.aliases.items() if name in names}
    yield safetensors_header(((item.name, item.dtype, item.shape) for item in shard), {"format": "pt", **tied})
    for item in shard:
        step = max(1, CHUNK_BYTES // item_bytes(item.held))
        for start in range(0, item.elements, step):
            held = torch.empty(min(step, item.elements - start), dtype=dtype_of(item.held))
            reader.read_into([Slice(item.stored, item.shape, start, start + len(held), held)])
            values = held.to(dtype_of(item.through)).to(dtype_of(item.dtype))
            if lost := _overflows(held, values):
                overflowed[item.name] += lost
            if progress is not None:
                progress(values.nbytes)
            yield tensor_bytes(values)  # this frame keeps it alive until the next is requested


def _overflows(before: torch.Tensor, after: torch.Tensor) -> int:
    """Count the values that are finite before the cast and not after it."""
    if before.dtype == after.dtype or not before.is_floating_point():
        return 0
    if torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max:
        return 0
    return int(torch.isfinite(before).sum() - torch.isfinite(after).sum())
