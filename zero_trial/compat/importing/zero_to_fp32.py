"""The whole weights of a checkpoint in fp32, under the names of DeepSpeed's ``zero_to_fp32``.

Checkpoints of zero_trial and of DeepSpeed (ZeRO stages 0 to 3) are read alike, on one process and
without the model's code; of DeepSpeed's, no pickle is run.

    python -m zero_trial.compat.importing.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [-t TAG]

is for people who used to run the script ``zero_to_fp32.py`` in a checkpoint's folder, with its
options. ``zero-trial ckpt export`` does more, and holds no tensor whole in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from zero_trial.checkpoint.folder import checkpoint_folder, choose_checkpoint, only_engine, take_inventory
from zero_trial.checkpoint.format import MANIFEST_NAME, Slice, dtype_of
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.compat.importing.deepspeed import read_deepspeed
from zero_trial.compat.importing.deepspeed_files import find_deepspeed
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.errors import CheckpointError, ConfigError, ZeroTrialError
from zero_trial.util.files import replacing, write_atomic
from zero_trial.util.text import parse_size

log = logging.getLogger("zero_trial")

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


class StoredWeight:
    """A tensor that is still in a checkpoint; :meth:`contiguous` reads it, in ``dtype``: at least
    fp32 where it is in floating point."""

    def __init__(self, shape: Sequence[int], stored: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        self.shape = torch.Size(shape)
        narrow = stored.is_floating_point and stored.itemsize < 4
        self.dtype = torch.float32 if narrow else stored
        self._read = read

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """Read the values, new at each call."""
        return self._read().to(self.dtype)


class _WholeWeights:
    """The weights of a checkpoint by name; tied names share one StoredWeight. ``frozen`` is None
    where the checkpoint does not say."""

    def __init__(
        self, stored: Mapping[str, StoredWeight], aliases: Mapping[str, str], frozen: Iterable[str] | None, where: Path
    ) -> None:
        self.where = where
        self._stored = stored
        self._aliases = aliases
        self._frozen = None if frozen is None else set(frozen)

    def chosen(self, *, without_frozen: bool) -> dict[str, StoredWeight]:
        if without_frozen and self._frozen is None:
            raise CheckpointError(
                "this checkpoint does not say which parameters are frozen",
                where=str(self.where),
                fix="Leave exclude_frozen_parameters out, and remove them from the result.",
            )
        left_out = (self._frozen or set()) if without_frozen else set()
        found = {name: weight for name, weight in self._stored.items() if name not in left_out}
        tied = {alias: found[name] for alias, name in self._aliases.items() if name in found and alias not in left_out}
        return found | tied


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the whole state dict of a checkpoint: fp32 masters, frozen parameters, buffers.

    Args:
        checkpoint_dir: the folder that ``save_checkpoint`` was given, or a tag's own.
        tag: which checkpoint there (default: the newest; of DeepSpeed's the one that ``latest``
            names).
        lazy_mode: return :class:`StoredWeight` objects instead of tensors: ``.contiguous()`` reads
            one.

    Raises CheckpointError; every file of zero_trial's is verified first.
    """
    weights = _find(Path(checkpoint_dir), tag).chosen(without_frozen=exclude_frozen_parameters)
    return dict(weights) if lazy_mode else _read_all(weights)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write ``pytorch_model.bin`` or ``model.safetensors`` into ``output_dir``, or several shards
    with an index, in Hugging Face's layout. Holds one shard in memory.

    Args:
        dtype: of floating-point tensors: float32, float16, bfloat16.
        max_shard_size: bytes of a file, as a number or such as "5GB"; None: one file.
        safe_serialization: safetensors (a tied weight is written once) instead of ``torch.save``.
        tag: as for :func:`get_fp32_state_dict_from_zero_checkpoint`.
    """
    chosen = _output_dtype(dtype)
    weights = _find(Path(checkpoint_dir), tag).chosen(without_frozen=exclude_frozen_parameters)
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    limit = parse_size(str(max_shard_size), "max_shard_size") if max_shard_size is not None else None
    shards = _cut(weights, chosen, limit)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        values = _read_all({key: weights[key] for key in names}, chosen)
        with replacing(out / name) as draft:
            if safe_serialization:
                _save_safetensors(values, draft)
            else:
                torch.save(values, draft)
        places |= dict.fromkeys(names, name)
    if len(shards) > 1:
        total = sum(_bytes(weight, chosen) for weight in dict.fromkeys(weights.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_atomic(out / f"{stem}{suffix}.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights in fp32: see :func:`convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Move ``model`` to the host, load the checkpoint's weights into it, and return it. Names that
    only one of both has are logged, as far as they matter. Raises CheckpointError if no name
    matches.

    A model that an engine trains at ZeRO stage 3 takes them through the engine: every rank must
    call.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if state and len(unexpected) == len(state):
        raise CheckpointError(
            "no tensor of the checkpoint has a name of the model",
            where=str(checkpoint_dir),
            got=", ".join(sorted(unexpected)[:3]),
            expected=", ".join(sorted(missing)[:3]),
            fix="Pass the module that was given to initialize().",
        )
    if missing or unexpected:
        log.warning("not in the checkpoint: %s; not in the model: %s", missing or "none", unexpected or "none")
    return model


def _find(directory: Path, tag: str | None) -> _WholeWeights:
    """Open the checkpoint of either program."""
    if not directory.is_dir():
        raise CheckpointError("there is no such folder", where=str(directory))
    ours = (directory / tag / MANIFEST_NAME).is_file() if tag is not None else not (directory / "latest").is_file()
    folder = None if ours and tag is not None else find_deepspeed(directory, tag)
    if folder is None:
        return _of_ours(directory, tag)
    imported = read_deepspeed(folder, ImportOptions(with_optimizer=False))
    parts: dict[str, list[Slice]] = {}
    for shard in imported.shards:
        for part in shard:
            parts.setdefault(part.name.partition("/")[2], []).append(part)
    stored = {name: StoredWeight(own[0].shape, own[0].dtype, partial(_joined, own)) for name, own in parts.items()}
    return _WholeWeights(stored, imported.state["aliases"], imported.state["frozen"], folder.path)


def _of_ours(directory: Path, tag: str | None) -> _WholeWeights:
    folder = checkpoint_folder(directory, tag) if tag is not None else only_engine(choose_checkpoint(directory)).folder
    reader = CheckpointReader(folder)
    reader.verify()
    inventory = take_inventory(reader.manifest)
    if inventory.parts > 1:
        raise ConfigError(
            "the model is parallel itself: its parts have the same names, and only its own code knows how it has cut them",
            where=str(folder),
            got=f"{inventory.parts} parts",
            fix=f"Export each by itself: zero-trial ckpt export --part 0 to --part {inventory.parts - 1}.",
        )
    stored = {
        held.name: StoredWeight(held.entry.shape, dtype_of(held.entry.dtype), partial(reader.read, held.stored))
        for held in inventory.in_part(0)
    }
    frozen = inventory.state.get("frozen")
    return _WholeWeights(stored, inventory.aliases, frozen if isinstance(frozen, list) else None, folder)


def _joined(parts: Sequence[Slice]) -> torch.Tensor:
    """Put the slices of one tensor together. Raises CheckpointError where elements are missing."""
    whole = torch.empty(prod(parts[0].shape), dtype=parts[0].dtype)
    for part in parts:
        whole[part.start : part.stop].copy_(part.flat)
    if sum(part.stop - part.start for part in parts) != whole.numel():
        raise CheckpointError("elements of a tensor are missing", where=parts[0].name)
    return whole.view(parts[0].shape)


def _read_all(weights: Mapping[str, StoredWeight], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Read all tensors, tied ones once; floating-point ones in ``dtype``, if given."""
    read: dict[int, torch.Tensor] = {}
    for weight in weights.values():
        if id(weight) not in read:
            values = weight.contiguous()
            read[id(weight)] = values.to(dtype) if dtype is not None and values.is_floating_point() else values
    return {name: read[id(weight)] for name, weight in weights.items()}


def _bytes(weight: StoredWeight, dtype: torch.dtype) -> int:
    return weight.numel() * (dtype if weight.dtype.is_floating_point else weight.dtype).itemsize


def _cut(weights: Mapping[str, StoredWeight], dtype: torch.dtype, limit: int | None) -> list[list[str]]:
    """Fill files with names up to ``limit`` bytes or one tensor; tied names are in one file."""
    shards: list[list[str]] = [[]]
    home: dict[int, list[str]] = {}
    used = 0
    for name, weight in weights.items():
        if id(weight) not in home:
            size = _bytes(weight, dtype)
            if limit is not None and shards[-1] and used + size > limit:
                shards.append([])
                used = 0
            used += size
            home[id(weight)] = shards[-1]
        home[id(weight)].append(name)
    return shards


def _save_safetensors(values: Mapping[str, torch.Tensor], path: Path) -> None:
    first: dict[int, str] = {}
    for name, value in values.items():
        first.setdefault(id(value), name)
    aliases = {f"alias:{name}": first[id(value)] for name, value in values.items() if first[id(value)] != name}
    save_file({name: values[name] for name in first.values()}, str(path), metadata={"format": "pt", **aliases})


def _output_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = _DTYPES.get(str(dtype).lower().removeprefix("torch."))
    if found is None:
        raise ConfigError("not a dtype of weights", where="dtype", got=dtype, expected=", ".join(_DTYPES))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command at the top of this file; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32", description="Write the whole weights of a checkpoint in fp32.", allow_abbrev=False
    )
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="a folder for pytorch_model.bin or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="the largest size of a file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the newest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted for DeepSpeed's command lines")
    options = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            options.max_shard_size,
            options.safe_serialization,
            options.tag,
            options.exclude_frozen_parameters,
        )
    except ZeroTrialError as fault:
        sys.stderr.write(f"zero_to_fp32: {fault}\n")
        return fault.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
