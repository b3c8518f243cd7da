"""Detect the format of a path, and read it. This module reads plain weights and the other files of
Hugging Face's Trainer; checkpoints of DeepSpeed and torch have their own modules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zero_trial.checkpoint.format import MANIFEST_NAME, Slice
from zero_trial.checkpoint.range_reader import files_of_index
from zero_trial.compat.importing.dcp import METADATA, read_dcp
from zero_trial.compat.importing.deepspeed import read_deepspeed
from zero_trial.compat.importing.deepspeed_files import find_deepspeed
from zero_trial.compat.importing.imported import (
    ImportedState,
    ImportOptions,
    common_step,
    folder_name,
    fresh_state,
    is_buffer,
    note_optimizer,
    one_number,
    optimizer_groups,
    optimizer_state,
    plain_or_none,
)
from zero_trial.compat.importing.torch_file import as_dict, read_torch_file, same_elements
from zero_trial.errors import CheckpointError

TRAINER_STATE = "trainer_state.json"


def read_source(source: Path, tag: str | None, options: ImportOptions) -> ImportedState:
    """Read a path with the reader of its format. Raises CheckpointError if the format is unknown or
    the path is missing."""
    if not source.exists():
        raise CheckpointError("no such file or folder", where=str(source))
    folder = find_deepspeed(source, tag)
    if folder is not None:
        try:
            return read_deepspeed(folder, options)
        except RuntimeError as fault:  # from torch: a tensor instead of a number or a list
            raise CheckpointError("unexpected content", where=str(source), got=str(fault)[:200]) from fault
    if (source / METADATA).is_file():
        return read_dcp(source, options)
    weights = find_weights(source)
    if weights is not None:
        read = read_weights(weights, options)
        return add_trainer_state(source, read, options) if (source / TRAINER_STATE).is_file() else read
    if (source / MANIFEST_NAME).is_file() or any((path / MANIFEST_NAME).is_file() for path in source.iterdir()):
        raise CheckpointError(
            "this is already a checkpoint of zero_trial", where=str(source), fix="Load it with engine.load_checkpoint."
        )
    raise CheckpointError(
        "found nothing that can be imported",
        where=str(source),
        got=", ".join(sorted(path.name for path in source.iterdir())[:6]) or "an empty folder",
        expected=f"a DeepSpeed checkpoint (mp_rank_00_model_states.pt ...), or one of {', '.join(NAMES)}",
    )


# Plain weights, as torch and Hugging Face save them: one file, or several with an index.


NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names to look for in a folder; the first that exists is used."""

WRAPPERS = ("state_dict", "model", "module", "model_state_dict")
"""Keys under which training scripts store the weights."""


def find_weights(source: Path) -> Path | None:
    """Return the file of weights, or the index of several files, at ``source``."""
    if source.is_file():
        return source
    return next((source / name for name in NAMES if (source / name).is_file()), None) if source.is_dir() else None


def read_weights(path: Path, options: ImportOptions) -> ImportedState:
    """Read every tensor as a parameter or, by dtype or name, a buffer. One row per file."""
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
        [f"treated as buffers, by name or dtype: {', '.join(buffers[:8])}{' ...' if len(buffers) > 8 else ''}"]
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
    """Return name -> tensor and a key that is equal for tied names."""
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    content = read_torch_file(path)
    for wrapper in WRAPPERS:
        inside = content.get(wrapper) if isinstance(content, dict) else None
        if isinstance(inside, dict) and any(isinstance(value, torch.Tensor) for value in inside.values()):
            left_out += [f"{path.name}: {key!r}, beside {wrapper!r}" for key in content if key != wrapper]
            content = inside
            break
    if not isinstance(content, dict):
        raise CheckpointError(
            "this file contains no weights", where=str(path), got=type(content).__name__, expected="a state dict"
        )
    found = {
        str(name): (value.detach(), same_elements(value) if value.numel() else object())
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }
    left_out += [
        f"{path.name}: {name!r}, not a tensor" for name, value in content.items() if not isinstance(value, torch.Tensor)
    ]
    if not found:
        raise CheckpointError(
            "this file contains no weights", where=str(path), got="no tensor", expected="a state dict"
        )
    return found


def _from_safetensors(path: Path) -> dict[str, tuple[torch.Tensor, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: (file.get_tensor(name), object()) for name in file.keys()}  # noqa: SIM118 - not a dict
            # aliases of a tensor, as written by ``engine.save_16bit_model``
            pairs = {key[6:]: name for key, name in (file.metadata() or {}).items() if key.startswith("alias:")}
            return found | {alias: found[name] for alias, name in pairs.items() if name in found and alias not in found}
    except (SafetensorError, OSError) as fault:
        raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault


# A ``checkpoint-N`` of Hugging Face's Trainer from training without DeepSpeed (one process, DDP, or
# FSDP with a full state dict).
#
#     model.safetensors, or with an index   weights
#     optimizer.pt                          torch's state dict: parameters by number
#     scheduler.pt                          torch's state dict
#     trainer_state.json                    global_step
#
# The optimizer numbers parameters in model order, first those with weight decay, then those
# without. The files do not contain that order, so we build the class in ``config.json`` on the meta
# device.


_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
_GIVE_NAMES = "Pass --names FILE, a JSON list of the parameters' names in each group; or --no-optimizer."


def add_trainer_state(folder: Path, weights: ImportedState, options: ImportOptions) -> ImportedState:
    """Return ``weights`` with the Trainer's optimizer, schedule and step. The tag is the name that
    a Trainer with an engine expects."""
    path = folder / TRAINER_STATE
    try:
        step = int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CheckpointError("not a Trainer's state", where=str(path), got=str(fault)) from fault
    left_out = list(weights.left_out)
    state = dict(weights.state)
    state["counters"] = {**state["counters"], "global_steps": step, "micro_steps": step}
    if (folder / _SCHEDULER).is_file():
        state["scheduler"] = plain_or_none(read_torch_file(folder / _SCHEDULER), _SCHEDULER, left_out)
    shapes = {part.name.removeprefix("param/"): part.shape for row in weights.shards for part in row}
    rows = list(weights.shards)
    if (folder / _OPTIMIZER).is_file() and options.with_optimizer:
        names, aliases = _architecture(folder) if options.names is None else (options.names, {})
        state["aliases"] = {**state["aliases"], **{options.own(a): options.own(b) for a, b in aliases.items()}}
        own = [[options.own(name) for name in row] for row in names]
        rows.append(_optimizer(folder / _OPTIMIZER, own, shapes, state, left_out))
    elif not (folder / _OPTIMIZER).is_file():
        left_out.append(f"the optimizer's state: {_OPTIMIZER} is missing")
    return replace(
        weights,
        kind=f"Hugging Face Trainer, {weights.kind}",
        tag=f"global_step{step}",
        shards=rows,
        state=state,
        left_out=left_out,
    )


def _optimizer(
    path: Path,
    names: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    state: dict[str, Any],
    left_out: list[str],
) -> list[Slice]:
    """Record groups and steps in ``state``; return the moments."""
    content, where = as_dict(read_torch_file(path), str(path)), str(path)
    groups, states = optimizer_groups(content, where), optimizer_state(content, where)
    counts = [len(group["params"]) for group in groups]
    found, scalars, kinds = [], {}, set()
    if [len(row) for row in names] != counts:
        raise CheckpointError(
            "the optimizer has different parameters than the model",
            where=where,
            got=f"groups of {counts}",
            expected=f"groups of {[len(row) for row in names]}, with weight decay and without",
            fix=_GIVE_NAMES,
        )
    for index, (group, row) in enumerate(zip(groups, names, strict=True)):
        steps: set[float] = set()
        for number, name in zip(group["params"], row, strict=True):
            for kind, value in states.get(number, {}).items():
                if kind == "step":
                    steps |= set(one_number("step", value).values())
                elif isinstance(value, torch.Tensor) and value.shape == shapes.get(name):
                    kinds.add(str(kind))
                    found.append(Slice.whole(f"state/{kind}/{name}", value.detach()))
                else:
                    got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                    raise CheckpointError(
                        f"{kind} does not fit {name}",
                        where=where,
                        got=got,
                        expected=shapes.get(name, "a parameter of the model"),
                        fix=_GIVE_NAMES,
                    )
        scalars[str(index)] = common_step(steps, f"{where}, group {index}")
    note_optimizer(state, groups, scalars, kinds, left_out)
    return found


def _architecture(folder: Path) -> tuple[list[list[str]], dict[str, str]]:
    """Return the parameters' names in each of the Trainer's groups, and aliases of tied ones, from
    the class in config.json. Raises CheckpointError if the class is unavailable."""
    try:
        import transformers
    except ImportError as fault:
        raise CheckpointError(
            "the optimizer identifies its parameters only by number, and transformers, which knows their order, is not installed",
            where=str(folder / _OPTIMIZER),
            fix=_GIVE_NAMES,
        ) from fault
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, str((config.architectures or [""])[0]))
        with torch.device("meta"):
            model = kind(config)
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    except Exception as fault:  # the library raises many kinds: an unknown class, a damaged file
        raise CheckpointError(
            "the model's class cannot be built to find its parameters' order",
            where=str(folder / "config.json"),
            got=f"{type(fault).__name__}: {fault}"[:200],
            fix=_GIVE_NAMES,
        ) from fault
    first: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            aliases[name] = first[id(param)]
    names = [name for name in first.values() if model.get_parameter(name).requires_grad]
    return [[name for name in names if name in decayed], [name for name in names if name not in decayed]], aliases
