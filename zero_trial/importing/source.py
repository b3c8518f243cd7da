"""Find out what a path holds, a DeepSpeed checkpoint or plain weights, and read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zero_trial.checkpoint.format import MANIFEST_NAME, Slice
from zero_trial.checkpoint.weights import files_of_index
from zero_trial.errors import CheckpointError
from zero_trial.importing.dcp import METADATA, read_dcp
from zero_trial.importing.deepspeed import read_deepspeed
from zero_trial.importing.deepspeed_files import find_deepspeed
from zero_trial.importing.huggingface import TRAINER_STATE, add_trainer_state
from zero_trial.importing.imported import ImportedState, ImportOptions, folder_name, fresh_state, is_buffer
from zero_trial.importing.torch_file import FileTensor, TorchFile


def read_source(source: Path, tag: str | None, options: ImportOptions) -> ImportedState:
    """Read a path with the reader of its format. Raises CheckpointError for a path of
    no known format, or a missing one."""
    if not source.exists():
        raise CheckpointError("there is no such file or folder", where=str(source))
    folder = find_deepspeed(source, tag)
    if folder is not None:
        return read_deepspeed(folder, options)
    if (source / METADATA).is_file():
        return read_dcp(source, options)
    weights = find_weights(source)
    if weights is not None:
        read = read_weights(weights, options)
        return add_trainer_state(source, read, options) if (source / TRAINER_STATE).is_file() else read
    if (source / MANIFEST_NAME).is_file() or any((path / MANIFEST_NAME).is_file() for path in source.iterdir()):
        raise CheckpointError(
            "this is a checkpoint of zero_trial already", where=str(source), fix="Load it with engine.load_checkpoint."
        )
    raise CheckpointError(
        "nothing here that can be imported",
        where=str(source),
        got=", ".join(sorted(path.name for path in source.iterdir())[:6]) or "an empty folder",
        expected=f"a DeepSpeed checkpoint (mp_rank_00_model_states.pt ...), or one of {', '.join(NAMES)}",
    )


# Plain weights, as torch and Hugging Face save them: one file, or several with an index.


NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""What is looked for in a folder, the first that is there."""

WRAPPERS = ("state_dict", "model", "module", "model_state_dict")
"""Entries below which a training script puts the weights."""


def find_weights(source: Path) -> Path | None:
    """Find the file of weights, or the index of several, at ``source``."""
    if source.is_file():
        return source
    return next((source / name for name in NAMES if (source / name).is_file()), None) if source.is_dir() else None


def read_weights(path: Path, options: ImportOptions) -> ImportedState:
    """Read every tensor as a parameter or, by its dtype or name, a buffer: a file of weights does
    not say which. One row per file."""
    files = files_of_index(path) if path.name.endswith(".index.json") else {path: None}
    left_out: list[str] = []
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    rows = []
    for file, wanted in files.items():
        row = []
        for raw, (tensor, token) in _tensors(file, left_out).items():
            if wanted is not None and raw not in wanted:
                continue
            name = options.own(raw)
            first = seen.setdefault(token, name)
            if first != name:
                aliases[name] = first
                continue
            place = "buffer" if is_buffer(name, tensor, options.buffers) else "param"
            row.append(Slice.whole(f"{place}/{name}", tensor))
        rows.append(row)
    tag = folder_name(path.parent) if path.name in NAMES else path.name.split(".")[0]
    buffers = sorted(
        part.name.removeprefix("buffer/") for row in rows for part in row if part.name.startswith("buffer/")
    )
    notes = (
        [f"taken for buffers, by name or dtype: {', '.join(buffers[:8])}{' ...' if len(buffers) > 8 else ''}"]
        if buffers
        else []
    )
    return ImportedState(
        f"weights, {len(files)} file{'s' if len(files) > 1 else ''}",
        tag,
        rows,
        fresh_state() | {"aliases": aliases},
        left_out,
        notes,
    )


def _tensors(path: Path, left_out: list[str]) -> dict[str, tuple[torch.Tensor, Any]]:
    """Return name -> tensor and what two names of one tensor have in common."""
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    content = TorchFile(path).content
    for wrapper in WRAPPERS:
        inside = content.get(wrapper) if isinstance(content, dict) else None
        if isinstance(inside, dict) and any(isinstance(value, FileTensor) for value in inside.values()):
            left_out += [f"{path.name}: {key!r}, beside {wrapper!r}" for key in content if key != wrapper]
            content = inside
            break
    if not isinstance(content, dict):
        raise CheckpointError(
            "there are no weights in this file", where=str(path), got=type(content).__name__, expected="a state dict"
        )
    found = {
        str(name): (value.tensor(), _token(value)) for name, value in content.items() if isinstance(value, FileTensor)
    }
    left_out += [
        f"{path.name}: {name!r}, not a tensor" for name, value in content.items() if not isinstance(value, FileTensor)
    ]
    if not found:
        raise CheckpointError(
            "there are no weights in this file", where=str(path), got="no tensor", expected="a state dict"
        )
    return found


def _token(value: FileTensor) -> Any:
    return value if value.numel else object()


def _from_safetensors(path: Path) -> dict[str, tuple[torch.Tensor, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: (file.get_tensor(name), object()) for name in file.keys()}  # noqa: SIM118 - not a dict
            return found | _tied(file.metadata() or {}, found)
    except (SafetensorError, OSError) as fault:
        raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault


def _tied(
    metadata: Mapping[str, str], found: Mapping[str, tuple[torch.Tensor, Any]]
) -> dict[str, tuple[torch.Tensor, Any]]:
    """Return other names of a tensor, as ``engine.save_16bit_model`` writes them into a file."""
    pairs = {key.removeprefix("alias:"): name for key, name in metadata.items() if key.startswith("alias:")}
    return {alias: found[name] for alias, name in pairs.items() if name in found and alias not in found}
