"""A model's weights out of a checkpoint, as safetensors files that any program reads: streamed, whole or not there at all.

    OUT.safetensors                         one file, where OUT is named like one
    OUT/model.safetensors                   one file in a folder, where everything fits into a shard
    OUT/model-00001-of-00003.safetensors    several, with model.safetensors.index.json, in Hugging Face's layout

Memory: a few chunks of 16 MiB, whatever the sizes of tensors and shards. Tied weights are written once; who has tied them ties them again
after loading (``safetensors.torch.load_model`` and ``from_pretrained`` do), and the names are in the metadata.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zero_trial.checkpoint.disk import Disk
from zero_trial.checkpoint.dtypes import safetensors_name
from zero_trial.checkpoint.export_plan import ExportPlan, Item
from zero_trial.checkpoint.stream import TensorStream
from zero_trial.errors import CheckpointError, ConfigError

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
Told = Callable[[int], object]


@dataclass(frozen=True)
class Exported:
    """The files that were written, the index last; ``overflowed``: values of a tensor that were finite and are not in its new dtype."""

    files: dict[Path, int]  # bytes
    overflowed: dict[str, int] = field(default_factory=dict)


def file_names(out: Path, shards: int) -> list[Path]:
    """Where the shards go, and the index if there are several. Raises ConfigError if one of them, or something else in the way, is there."""
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
        paths, folder = [out / f"model{SUFFIX}"], out
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


def write_export(stream: TensorStream, plan: ExportPlan, out: Path, told: Told | None = None) -> Exported:
    """Writes every file beside its place and renames all at the end, the index last. Raises ConfigError and CheckpointError; then nothing
    is left behind. ``told`` gets the bytes as they are written."""
    paths = file_names(out, len(plan.shards))
    folder, disk, overflowed = paths[0].parent, Disk(), dict[str, int]()
    parts = [path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths]
    with contextlib.ExitStack() as undo:
        try:
            _make_folder(folder, undo)
            for part in parts:
                undo.callback(part.unlink, missing_ok=True)
            for part, shard in zip(parts, plan.shards, strict=False):
                disk.write(part, _shard_chunks(stream, shard, plan, overflowed, told))
            if len(paths) > len(plan.shards):
                disk.write(parts[-1], [index_text(plan, paths).encode()])
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


def index_text(plan: ExportPlan, paths: Sequence[Path]) -> str:
    """``model.safetensors.index.json``: which file has which tensor, and their bytes in all."""
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
    stream: TensorStream, shard: Sequence[Item], plan: ExportPlan, overflowed: dict[str, int], told: Told | None
) -> Iterator[bytes | memoryview]:
    yield _header(shard, plan)
    for item in shard:
        for data in stream.chunks(item.stored):
            out = data.to(item.through).to(item.dtype)
            if lost := _overflows(data, out):
                overflowed[item.name] = overflowed.get(item.name, 0) + lost
            size = out.numel() * out.element_size()
            if told is not None:
                told(size)
            # the view does not keep ``out`` alive; this frame does, until the consumer has taken the chunk
            yield memoryview((ctypes.c_char * size).from_address(out.data_ptr())).cast("B")
            del data, out


def _overflows(before: torch.Tensor, after: torch.Tensor) -> int:
    """How many values were finite and are not any more."""
    if before.dtype == after.dtype or not before.is_floating_point():
        return 0
    if torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max or torch.isfinite(after.sum(dtype=torch.float64)):
        return 0
    return int(torch.isfinite(before).sum() - torch.isfinite(after).sum())


def _header(shard: Sequence[Item], plan: ExportPlan) -> bytes:
    here = {item.name for item in shard}
    tied = {f"alias:{alias}": name for alias, name in plan.aliases.items() if name in here}
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    end = 0
    for item in shard:
        start, end = end, end + item.bytes
        entries[item.name] = {
            "dtype": safetensors_name(item.dtype),
            "shape": list(item.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
