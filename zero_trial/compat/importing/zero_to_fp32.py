"""The full fp32 weights of a checkpoint, with the functions of DeepSpeed's ``zero_to_fp32``.

Reads checkpoints of zero_trial and DeepSpeed (ZeRO stages 0 to 3) in one process, without the
model's code and without running DeepSpeed's pickles. Holds the whole model in memory, unlike
``zero-trial ckpt export``, which never holds a whole tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from zero_trial.checkpoint.folder import checkpoint_folder, choose_checkpoint, only_engine, take_inventory
from zero_trial.checkpoint.format import MANIFEST_NAME, Slice
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.compat.importing.deepspeed import read_deepspeed
from zero_trial.compat.importing.deepspeed_files import find_deepspeed
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.files import replacing, write_atomic
from zero_trial.util.text import parse_size

log = logging.getLogger("zero_trial")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """Return the full state dict of a checkpoint: fp32 masters, frozen parameters, buffers. Tied
    names share one tensor.

    Args:
        checkpoint_dir: the folder passed to ``save_checkpoint``, or the folder of a tag.
        tag: the checkpoint to read (default: the newest; for DeepSpeed, the one in ``latest``).

    Raises CheckpointError. First verifies every file of a zero_trial checkpoint.
    """
    directory = Path(checkpoint_dir)
    if not directory.is_dir():
        raise CheckpointError("the folder does not exist", where=str(directory))
    ours = (directory / tag / MANIFEST_NAME).is_file() if tag is not None else not (directory / "latest").is_file()
    theirs = None if ours and tag is not None else find_deepspeed(directory, tag)
    if theirs is None:
        weights, aliases, frozen = _of_ours(directory, tag)
    else:
        imported = read_deepspeed(theirs, ImportOptions(with_optimizer=False))
        parts: dict[str, list[Slice]] = {}
        for part in (part for shard in imported.shards for part in shard):
            parts.setdefault(part.name.partition("/")[2], []).append(part)
        weights = {name: _joined(own) for name, own in parts.items()}
        aliases, frozen = imported.state["aliases"], imported.state["frozen"]
    if exclude_frozen_parameters and frozen is None:
        raise CheckpointError(
            "this checkpoint does not record which parameters are frozen",
            where=str(directory),
            fix="Omit exclude_frozen_parameters, and remove them from the result.",
        )
    left_out = set(frozen or ()) if exclude_frozen_parameters else set()
    narrow = {name for name, weight in weights.items() if weight.is_floating_point() and weight.dtype.itemsize < 4}
    kept = {name: weight for name, weight in weights.items() if name not in left_out}
    found = {name: weight.float() if name in narrow else weight for name, weight in kept.items()}
    tied = {alias: found[name] for alias, name in aliases.items() if name in found and alias not in left_out}
    return found | tied


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write ``pytorch_model.bin`` or ``model.safetensors`` into ``output_dir``, or several shards
    with an index, in Hugging Face's layout.

    Args:
        max_shard_size: bytes per file, as a number or text such as "5GB"; None: one file.
        safe_serialization: safetensors (a tied weight is written once) instead of ``torch.save``.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    limit = parse_size(str(max_shard_size), "max_shard_size") if max_shard_size is not None else None
    shards = _cut(weights, limit)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        with replacing(out / name) as draft:
            if safe_serialization:
                _save_safetensors({key: weights[key] for key in names}, draft)
            else:
                torch.save({key: weights[key] for key in names}, draft)
        places |= dict.fromkeys(names, name)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in {id(weight): weight for weight in weights.values()}.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_atomic(out / f"{stem}{suffix}.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Move ``model`` to the CPU, load the checkpoint's weights into it, and return it. Logs
    relevant missing and unexpected names. Raises CheckpointError if no name matches.

    If an engine trains the model at ZeRO stage 3, the engine loads the weights: call on every rank.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if state and len(unexpected) == len(state):
        raise CheckpointError(
            "no tensor of the checkpoint has the name of a model parameter",
            where=str(checkpoint_dir),
            got=", ".join(sorted(unexpected)[:3]),
            expected=", ".join(sorted(missing)[:3]),
            fix="Pass the module that was passed to initialize().",
        )
    if missing or unexpected:
        log.warning("not in the checkpoint: %s; not in the model: %s", missing or "none", unexpected or "none")
    return model


def _of_ours(directory: Path, tag: str | None) -> tuple[dict[str, torch.Tensor], Mapping[str, str], list[str] | None]:
    """Return the weights, aliases of tied ones, and the names of frozen ones."""
    folder = checkpoint_folder(directory, tag) if tag is not None else only_engine(choose_checkpoint(directory)).folder
    reader = CheckpointReader(folder)
    reader.verify()
    inventory = take_inventory(reader.manifest)
    if inventory.parts > 1:
        raise ConfigError(
            "the model is parallel itself: its parts have the same names, and only its own code knows how the weights are split",
            where=str(folder),
            got=f"{inventory.parts} parts",
            fix=f"Export each part separately: zero-trial ckpt export --part 0 to --part {inventory.parts - 1}.",
        )
    weights = {held.name: reader.read(held.stored) for held in inventory.in_part(0)}
    frozen = inventory.state.get("frozen")
    return weights, inventory.aliases, frozen if isinstance(frozen, list) else None


def _joined(parts: Sequence[Slice]) -> torch.Tensor:
    """Join the slices of one tensor. Raises CheckpointError if elements are missing."""
    whole = torch.empty(prod(parts[0].shape), dtype=parts[0].dtype)
    for part in parts:
        whole[part.start : part.stop].copy_(part.flat)
    if sum(part.stop - part.start for part in parts) != whole.numel():
        raise CheckpointError("elements of a tensor are missing", where=parts[0].name)
    return whole.view(parts[0].shape)


def _cut(weights: Mapping[str, torch.Tensor], limit: int | None) -> list[list[str]]:
    """Split names into files of at most ``limit`` bytes or one tensor; tied names share a file."""
    shards: list[list[str]] = [[]]
    home: dict[int, list[str]] = {}
    used = 0
    for name, weight in weights.items():
        if id(weight) not in home:
            if limit is not None and shards[-1] and used + weight.nbytes > limit:
                shards.append([])
                used = 0
            used += weight.nbytes
            home[id(weight)] = shards[-1]
        home[id(weight)].append(name)
    return shards


def _save_safetensors(values: Mapping[str, torch.Tensor], path: Path) -> None:
    first: dict[int, str] = {}
    for name, value in values.items():
        first.setdefault(id(value), name)
    aliases = {f"alias:{name}": first[id(value)] for name, value in values.items() if first[id(value)] != name}
    save_file({name: values[name] for name in first.values()}, str(path), metadata={"format": "pt", **aliases})
