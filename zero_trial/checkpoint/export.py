"""Export a checkpoint's weights as safetensors files that any program reads.

    OUT.safetensors                         one file, if OUT is named like one
    OUT/model.safetensors                   one file in a folder, if everything fits into a shard
    OUT/model-00001-of-00003.safetensors    several, with model.safetensors.index.json, in Hugging
                                            Face's layout

Memory: a few chunks of 16 MiB, whatever the sizes of tensors and shards. Tied weights are written
once, with the other names in the metadata; ``safetensors.torch.load_model`` and ``from_pretrained``
tie them again. Dtypes are names, as in the manifest; only weights that change theirs need torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from zero_trial.checkpoint.folder import Inventory, StoredTensor
from zero_trial.checkpoint.format import (
    check_dtype,
    dtype_of,
    is_floating,
    item_bytes,
    safetensors_header,
    tensor_bytes,
)
from zero_trial.checkpoint.plain_weights import FILE, INDEX, WeightsReader
from zero_trial.checkpoint.range_reader import CheckpointReader, Progress
from zero_trial.checkpoint.writer import DurableFiles
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.files import replacing

if TYPE_CHECKING:
    import torch  # weights that keep their dtype do not take the second that its import takes

# The plan: which tensors are written, in which dtype, into which file. Decided before anything is
# read.


class WeightSource(Enum):
    """Which values of a weight to export: its master in the optimizer, where there is one, what
    forward computes with, or the moving average of the master (ds_config's ``ema``)."""

    MASTERS = "masters"
    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True)
class ExportItem:
    """One tensor of the export. Its elements go from ``held`` through ``through`` to ``dtype``."""

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
        took: which weights these are, for the user.
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
        dtype: of all floating tensors; None leaves each as it is.
        shard_bytes: a file holds at most so much, or one tensor.

    Raises ConfigError for a model of several parallel parts unless one ``part`` is named,
    CheckpointError where there is nothing to write.
    """
    chosen = inventory.in_part(_part(inventory, part, where))
    if not chosen:
        raise CheckpointError("there are no weights in this checkpoint", where=where)
    averaged = [held for held in chosen if "ema" in held.states and inventory.state.get("ema") is not None]
    if weights is WeightSource.EMA and not averaged:
        raise CheckpointError(
            "there are no averages of the weights in this checkpoint",
            where=where,
            fix='They are kept with "ema" in ds_config, from the first step on. Leave --ema out for the weights.',
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


def _item(held: StoredTensor, weights: WeightSource, dtype: str | None) -> ExportItem:
    stored = check_dtype(held.entry.dtype)
    through = check_dtype(held.lives) if weights is WeightSource.MODEL and held.lives is not None else stored
    source = held.stored
    if weights is WeightSource.EMA and "ema" in held.states:  # what is not trained has none, and is its own
        source = source.removesuffix(f"param/{held.name}") + f"state/ema/{held.name}"
        stored = through = check_dtype(held.states["ema"])
    final = dtype if dtype is not None and is_floating(stored) else through
    return ExportItem(held.name, source, held.entry.shape, stored, through, final)


def _cut(items: Iterable[ExportItem], limit: int | None) -> tuple[tuple[ExportItem, ...], ...]:
    """Fill files in the model's order up to ``limit`` bytes. Within a file wide dtypes come first,
    so that every tensor begins at a multiple of its element's size.
    """
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
    """Say which of two sets of weights these are."""
    listed = list(params)
    masters = [held for held in listed if held.is_master]
    unknown = [held for held in listed if held.lives is None]
    if weights is WeightSource.EMA:
        averages = [held.states["ema"] for held in listed if "ema" in held.states]
        rest = "; the others are not trained" if len(averages) < len(listed) else ""
        return f"averages of {len(averages)} of {len(listed)} parameters, {_kinds(averages)}{rest}"
    if masters and weights is WeightSource.MASTERS:
        kinds = _kinds(held.entry.dtype for held in masters)
        return f"{kinds} masters of {len(masters)} of {len(listed)} parameters; the model computes in {_kinds(held.lives for held in masters)}"
    if masters:
        return f"weights as the model computes with them, {_kinds(held.lives for held in listed)}, rounded from their masters"
    note = "; the checkpoint does not say in which dtype the model computes" if unknown else ""
    return f"weights as they are stored, {_kinds(held.entry.dtype for held in listed)}; there are no masters beside them{note}"


def _kinds(names: Iterable[str | None]) -> str:
    return ", ".join(name for name, _ in Counter(name for name in names if name).most_common()) or "none"


def exported_dtype(word: str) -> str | None:
    """Return the dtype of ``keep`` (None), ``fp32``, ``bf16`` or ``fp16``."""
    short = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    if word in short:
        return short[word]
    raise ConfigError("not a dtype of an export", where="--dtype", got=word, expected=", ".join(short))


def describe_dtypes(items: Iterable[ExportItem]) -> str:
    """Format as ``float32, int64``, most frequent first."""
    return _kinds(item.dtype for item in items)


# The export itself: streamed, and whole or not there at all.

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Exported:
    """The files that were written.

    Attributes:
        files: the index last.
        overflowed: by tensor, values that were finite and are not in its new dtype.
    """

    files: dict[Path, int]  # bytes
    overflowed: dict[str, int] = field(default_factory=dict)


def file_names(out: Path, shards: int) -> list[Path]:
    """Name the shards' files, and the index if there are several. Raises ConfigError if one of
    them, or something else in the way, exists."""
    if out.suffix == SUFFIX:
        if shards > 1:
            raise ConfigError(
                "one file cannot be several shards",
                where="OUT",
                got=f"{out}, {shards} shards",
                fix="Name a folder, or leave --shard-size out.",
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
            "there are weights already", where="OUT", got=str(taken[0]), fix="Name another place, or remove them."
        )
    return paths


def write_export(stream: TensorStream, plan: ExportPlan, out: Path, progress: Progress | None = None) -> Exported:
    """Write every file beside its place and rename all at the end, the index last.

    Raises ConfigError and CheckpointError, and leaves nothing behind then. ``progress`` gets the
    bytes as they are written.
    """
    paths = file_names(out, len(plan.shards))
    folder, disk, overflowed = paths[0].parent, DurableFiles(), dict[str, int]()
    parts = [path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths]
    with contextlib.ExitStack() as undo:
        try:
            _make_folder(folder, undo)
            for part in parts:
                undo.callback(part.unlink, missing_ok=True)
            for part, shard in zip(parts, plan.shards, strict=False):
                disk.write(part, _shard_chunks(stream, shard, plan, overflowed, progress))
            if len(paths) > len(plan.shards):
                disk.write(parts[-1], [_index_text(plan, paths).encode()])
            for part, path in zip(parts, paths, strict=True):
                disk.rename(part, path)
                undo.callback(path.unlink, missing_ok=True)
            disk.sync_folder(folder)
        except OSError as fault:
            raise CheckpointError(
                "the export cannot be written", where=str(fault.filename or out), got=fault.strerror or fault
            ) from fault
        undo.pop_all()
    return Exported({path: path.stat().st_size for path in paths}, overflowed)


def _index_text(plan: ExportPlan, paths: Sequence[Path]) -> str:
    """Make the text of ``model.safetensors.index.json``: which file has which tensor, and their
    bytes in all."""
    places = {item.name: path.name for path, shard in zip(paths, plan.shards, strict=False) for item in shard}
    return json.dumps({"metadata": {"total_size": plan.bytes}, "weight_map": places}, indent=2) + "\n"


def _make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        undo.callback(_remove_if_empty, folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _shard_chunks(
    stream: TensorStream,
    shard: Sequence[ExportItem],
    plan: ExportPlan,
    overflowed: dict[str, int],
    progress: Progress | None,
) -> Iterator[bytes | memoryview]:
    yield _header(shard, plan)
    for item in shard:
        for data in stream.chunks(item.stored):
            if progress is not None:
                progress(len(data) // item_bytes(item.held) * item_bytes(item.dtype))
            if item.held == item.through == item.dtype:
                yield memoryview(data)
            else:
                out = _cast(data, item, overflowed)
                # the view does not keep ``out`` alive; this frame does, until the consumer has
                # taken the chunk
                yield tensor_bytes(out)
                del out
            del data


def _cast(data: bytearray, item: ExportItem, overflowed: dict[str, int]) -> torch.Tensor:
    """Return a chunk in its new dtype; what overflows is counted."""
    import torch

    before = torch.frombuffer(data, dtype=dtype_of(item.held))
    after = before.to(dtype_of(item.through)).to(dtype_of(item.dtype))
    if lost := _overflows(before, after):
        overflowed[item.name] = overflowed.get(item.name, 0) + lost
    return after


def _overflows(before: torch.Tensor, after: torch.Tensor) -> int:
    """Count the values that were finite and are not any more."""
    import torch

    if before.dtype == after.dtype or not before.is_floating_point():
        return 0
    if torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max or torch.isfinite(after.sum(dtype=torch.float64)):
        return 0
    return int(torch.isfinite(before).sum() - torch.isfinite(after).sum())


def _header(shard: Sequence[ExportItem], plan: ExportPlan) -> bytes:
    names = {item.name for item in shard}
    tied = {f"alias:{alias}": name for alias, name in plan.aliases.items() if name in names}
    return safetensors_header(((item.name, item.dtype, item.shape) for item in shard), {"format": "pt", **tied})


# Tensors read in order, a chunk at a time, so that none is ever whole in memory.


OPEN_FILES = 64  # at once; a checkpoint of many ranks has as many files


class TensorStream:
    """A context manager that keeps the files open which were read last."""

    def __init__(self, reader: CheckpointReader, chunk_bytes: int = 1 << 24) -> None:
        self._reader = reader
        self._chunk_bytes = chunk_bytes
        self._open: OrderedDict[str, WeightsReader] = OrderedDict()

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def chunks(self, name: str) -> Iterator[bytearray]:
        """Yield the elements of ``name`` from first to last, in new bytes of its dtype and at most
        ``chunk_bytes`` of them. Raises CheckpointError, also where a file has another dtype."""
        entry = self._reader.manifest.tensors[name]
        step = max(1, self._chunk_bytes // item_bytes(entry.dtype))
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            count = piece.stop - piece.start
            for start in range(0, count, step):
                yield self._file(piece.file).read_stored(piece.key, start, min(start + step, count), entry.dtype)

    def _file(self, name: str) -> WeightsReader:
        if name not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[name] = WeightsReader(self._reader.folder / name)
        self._open.move_to_end(name)
        return self._open[name]


# The weights of a living model as one safetensors file.


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` beside ``path`` and give the file its name when it is on the disk: until
    then the old file, if any, stays.

    Raises OSError or SafetensorError, and leaves nothing behind then.
    """
    from safetensors.torch import save_file

    with replacing(path) as part:
        save_file(dict(tensors), str(part), metadata=dict(metadata))
