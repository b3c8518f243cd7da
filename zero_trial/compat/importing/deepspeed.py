"""Read a DeepSpeed checkpoint of ZeRO stage 0 to 3 as slices and an engine's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.compat.importing.deepspeed_files import DeepSpeedFolder, ModelStates
from zero_trial.compat.importing.deepspeed_optimizer import (
    NumberedOptimizer,
    flat_groups,
    group_of_buffer,
    param_groups,
    shapes_of,
    stage_of,
)
from zero_trial.compat.importing.imported import (
    ImportedState,
    ImportOptions,
    client_state,
    counters,
    folder_name,
    fresh_state,
    loss_scaler,
    note_optimizer,
    one_number,
    optimizer_groups,
    plain_or_none,
)
from zero_trial.compat.importing.torch_file import read_torch_file
from zero_trial.errors import CheckpointError

State = Mapping[Any, Any]


def read_deepspeed(folder: DeepSpeedFolder, options: ImportOptions) -> ImportedState:
    """Open all files; tensors remain in the files until written. Raises CheckpointError."""
    models = [_dict(path) for path in folder.models]
    model = ModelStates(models, options, str(folder.models[0]))
    left_out = [f"{name}: not a tensor" for name in model.not_tensors]
    state = _state(model, left_out)
    optimizers = [_inner(path) for path in folder.optimizers]
    if folder.universal is not None:
        stage, found = 0, read_universal(folder.universal, model, options, state, left_out)
        masters = {part.name.removeprefix("param/"): part.shape for part in found if part.name.startswith("param/")}
        model.check_shapes(masters)
        rows = model.weights(set(masters), sharded=any(model.tensors[name].numel() == 0 for name in masters))
        shards = [rows[0] + found, *rows[1:]]
    elif optimizers:
        stage, shards = _sharded(model, optimizers, options, state, left_out)
    else:
        stage, shards = 0, _whole(model, options, state, left_out)
    version, ranks = model.first.get("ds_version"), len(optimizers) or _ranks(model.first)
    form = (
        "universal" if folder.universal is not None else f"ZeRO stage {stage}, {ranks} rank{'s' if ranks != 1 else ''}"
    )
    return ImportedState(
        f"DeepSpeed {version}, {form}",
        folder_name(folder.path),
        shards,
        state,
        left_out,
        world={"zero_stage": stage, "ranks": ranks, "written_by": f"DeepSpeed {version}"},
    )


def _sharded(
    model: ModelStates, optimizers: Sequence[State], options: ImportOptions, state: dict[str, Any], left_out: list[str]
) -> tuple[int, list[list[Slice]]]:
    """Read stages 1 to 3: masters and moments from flat buffers, all else from model files."""
    stage = stage_of(optimizers[0])
    groups = flat_groups(model.first, optimizers, options, model.where)
    shapes = {run.name: run.shape for group in groups for run in group.runs}
    model.check_shapes(shapes)
    if stage == 3 and len(model.parameters) != len(shapes.keys() | model.frozen_shapes().keys()):
        strangers = sorted(set(model.parameters) - shapes.keys() - model.frozen_shapes().keys())
        raise CheckpointError("some parameters have no values", where=model.where, got=strangers[:4])
    rows = model.weights(set(shapes), sharded=stage == 3)
    shards: list[list[Slice]] = [[] for _ in range(max(len(optimizers), len(rows)))]
    for index, row in enumerate(rows):
        shards[index] += row
    for rank in range(len(optimizers)):
        for group in groups:
            shards[rank] += group.slices(rank, options.with_optimizer, model.where)
    state["loss_scaler"] = loss_scaler(optimizers[0])
    if options.with_optimizer:
        scalars: dict[str, dict[str, float]] = {}
        for group in groups:
            scalars.setdefault(str(group.group), {}).update(group.scalars)
        count = 1 + max((group.group for group in groups), default=-1)
        kinds = {kind for group in groups for kind in group.states}
        note_optimizer(state, param_groups(optimizers[0], model.where), scalars, kinds, left_out, count)
    return stage, shards


def _whole(model: ModelStates, options: ImportOptions, state: dict[str, Any], left_out: list[str]) -> list[list[Slice]]:
    """Read stage 0: the optimizer, if any, is in the model's file; else read the weights."""
    placeholders = {name for name, tensor in model.tensors.items() if tensor.numel() == 0}
    if any(prod(shape) > 0 and name in placeholders for name, shape in model.frozen_shapes().items()):
        raise CheckpointError("a checkpoint of ZeRO stage 3 without its optimizer files", where=model.where)
    content = model.first.get("optimizer")
    if not isinstance(content, dict) or not content:
        listed = isinstance(model.first.get("param_shapes"), list)
        if listed:
            left_out.append("the optimizer's state: the files *_optim_states.pt are missing")
        return model.weights(set(), sharded=listed)
    state["loss_scaler"] = loss_scaler(content)
    if not options.with_optimizer:
        if "fp32_groups" in content or "fp32_groups_flat" in content:
            left_out.append("the fp32 masters, which belong to the optimizer: weights have the parameters' own dtype")
        return model.weights(set(), sharded=False)
    optimizer = NumberedOptimizer(content, model, options)
    found = optimizer.slices()
    note_optimizer(state, optimizer.groups, optimizer.scalars(), optimizer.kinds, left_out)
    mastered = {name for row in optimizer.names for name, _ in row} if optimizer.has_masters() else set()
    rows = model.weights(mastered, sharded=False)
    return [rows[0] + found]


def _state(model: ModelStates, left_out: list[str]) -> dict[str, Any]:
    content, frozen = model.first, None
    if isinstance(content.get("param_shapes"), list):  # parameters that are in no flat buffer
        named = {name for part in shapes_of(content, model.options, model.where) for name in part}
        frozen = sorted({*model.parameters, *model.frozen_shapes()} - named)
    config = plain_or_none(content.get("ds_config"), "ds_config", left_out)
    return fresh_state() | {
        "counters": counters(content),
        "scheduler": plain_or_none(content.get("lr_scheduler"), "lr_scheduler", left_out),
        "aliases": dict(model.aliases),
        "frozen": frozen,
        "ds_config": config if isinstance(config, dict) else {},
        "client": client_state(content, left_out),
    }


def _ranks(content: State) -> int:
    """Return the number of ranks that saved, which can differ from the number of files."""
    found = content.get("dp_world_size")
    return found if type(found) is int and found > 0 else 1


def _dict(path: Path) -> State:
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError("not a file of DeepSpeed", where=str(path), got=type(content).__name__, expected="a dict")
    return content


def _inner(path: Path) -> State:
    found = _dict(path).get("optimizer_state_dict")
    if not isinstance(found, dict):
        raise CheckpointError("optimizer_state_dict is missing", where=str(path))
    return found


# The universal format, written by DeepSpeed's converter: a folder per parameter, a file per kind of
# state.


COMMON = "optimizer_state.pt"


def read_universal(
    zero: Path, model: ModelStates, options: ImportOptions, state: dict[str, Any], left_out: list[str]
) -> list[Slice]:
    """Read masters and moments of every trained parameter; fill their part of ``state``."""
    common = read_torch_file(zero / COMMON) if (zero / COMMON).is_file() else {}
    if not isinstance(common, dict):
        raise CheckpointError("not a dict", where=str(zero / COMMON), got=type(common).__name__)
    buffers = shapes_of(model.first, options, model.where)
    inner = (
        common
        if "param_groups" in common
        else common.get("optimizer_state_dict", common.get("base_optimizer_state", {}))
    )
    settings = optimizer_groups(inner, str(zero / COMMON))
    home = group_of_buffer(settings, len(buffers))
    found: list[Slice] = []
    scalars: dict[str, dict[str, float]] = {}
    for index, shapes in enumerate(buffers):
        own = scalars.setdefault(str(home[index]), {})
        own |= one_number("step", settings[home[index]].get("step")) if home[index] < len(settings) else {}
        for name, shape in shapes.items():
            slices, numbers = _of_parameter(_folder(zero, name, options), name, shape, options.with_optimizer)
            found += slices
            own |= numbers
    if options.with_optimizer:
        kinds = {part.name.split("/")[1] for part in found if part.name.startswith("state/")}
        _steps(scalars, inner, home, state)
        note_optimizer(state, settings, scalars, kinds, left_out, max(home, default=-1) + 1)
    state["loss_scaler"] = loss_scaler(common)
    return found


def _folder(zero: Path, name: str, options: ImportOptions) -> Path:
    """Return the folder of a parameter; its name includes the prefix, if any."""
    prefixed = zero / (options.strip + name)
    return prefixed if prefixed.is_dir() else zero / name


def _steps(scalars: dict[str, dict[str, float]], inner: Any, home: list[int], state: Mapping[str, Any]) -> None:
    """Add the step of each group. Stage 3 stores the step with the shared state or not at all; then
    use the number of applied steps."""
    rows = inner.get("state", {}) if isinstance(inner, dict) else {}
    for index, group in enumerate(home):
        row = rows.get(index, {}) if isinstance(rows, dict) else {}
        scalars[str(group)] |= one_number("step", row.get("step")) if isinstance(row, dict) else {}
    counters = state["counters"]
    for own in scalars.values():
        own.setdefault("step", float(counters["global_steps"] - counters["skipped_steps"]))


def _of_parameter(
    folder: Path, name: str, shape: tuple[int, ...], with_state: bool
) -> tuple[list[Slice], dict[str, float]]:
    slices: list[Slice] = []
    numbers: dict[str, float] = {}
    files = {path.stem: path for path in sorted(folder.glob("*.pt"))}
    if "fp32" not in files:
        raise CheckpointError("a parameter has no values", where=str(folder), got="no fp32.pt")
    for kind, path in files.items() if with_state else [("fp32", files["fp32"])]:
        content = read_torch_file(path)
        value = content.get("param") if isinstance(content, dict) else content
        if isinstance(value, torch.Tensor) and value.numel() == prod(shape) and kind != "step":
            place = "param" if kind == "fp32" else f"state/{kind}"
            slices.append(Slice.whole(f"{place}/{name}", value.detach().reshape(shape)))
        elif number := one_number(kind, value):
            numbers |= number
        else:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError("not this parameter's state", where=str(path), got=got, expected=shape)
    return slices, numbers
