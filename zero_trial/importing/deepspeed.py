"""A DeepSpeed checkpoint of ZeRO stage 0, 1, 2 or 3 as slices of logical tensors and an engine's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from zero_trial.checkpoint.slice import Slice
from zero_trial.errors import CheckpointError
from zero_trial.importing import facts
from zero_trial.importing.findings import Findings, Wishes, folder_name, fresh_state
from zero_trial.importing.folder import DeepSpeedFolder
from zero_trial.importing.model_states import ModelStates
from zero_trial.importing.numbered import NumberedOptimizer
from zero_trial.importing.shards import FlatGroup, flat_groups, one_number, param_groups, stage_of
from zero_trial.importing.torch_file import TorchFile
from zero_trial.importing.universal import read_universal

State = Mapping[Any, Any]


def read_deepspeed(folder: DeepSpeedFolder, wishes: Wishes) -> Findings:
    """Opens all files; tensors stay in them until they are written. Raises CheckpointError for what is not understood."""
    models = [_dict(TorchFile(path)) for path in folder.models]
    model = ModelStates(models, wishes, str(folder.models[0]))
    left_out = [f"{name}: not a tensor" for name in model.not_tensors]
    state = _state(model, left_out)
    optimizers = [_inner(TorchFile(path)) for path in folder.optimizers]
    if folder.universal is not None:
        stage, shards = 0, _taken_apart(folder.universal, model, wishes, state, left_out)
    elif optimizers:
        stage, shards = _sharded(model, optimizers, wishes, state, left_out)
    else:
        stage, shards = 0, _whole(model, wishes, state, left_out)
    version, ranks = model.first.get("ds_version"), len(optimizers) or _ranks(model.first)
    form = (
        "universal" if folder.universal is not None else f"ZeRO stage {stage}, {ranks} rank{'s' if ranks != 1 else ''}"
    )
    return Findings(
        f"DeepSpeed {version}, {form}",
        folder_name(folder.path),
        shards,
        state,
        left_out,
        world={"zero_stage": stage, "ranks": ranks, "written_by": f"DeepSpeed {version}"},
    )


def _sharded(
    model: ModelStates, optimizers: Sequence[State], wishes: Wishes, state: dict[str, Any], left_out: list[str]
) -> tuple[int, list[list[Slice]]]:
    """Stages 1 to 3: masters and moments from the flat buffers, everything else from the model's files."""
    stage = stage_of(optimizers[0])
    groups = flat_groups(model.first, optimizers, wishes, model.where)
    shapes = {run.name: run.shape for group in groups for run in group.runs}
    model.check_shapes(shapes)
    if stage == 3 and len(model.parameters) != len(shapes.keys() | model.frozen_shapes().keys()):
        strangers = sorted(set(model.parameters) - shapes.keys() - model.frozen_shapes().keys())
        raise CheckpointError("there are no values of some parameters", where=model.where, got=strangers[:4])
    rows = model.weights(set(shapes), sharded=stage == 3)
    shards: list[list[Slice]] = [[] for _ in range(max(len(optimizers), len(rows)))]
    for index, row in enumerate(rows):
        shards[index] += row
    for rank in range(len(optimizers)):
        for group in groups:
            shards[rank] += group.slices(rank, wishes.with_optimizer, model.where)
    state["loss_scaler"] = facts.loss_scaler(optimizers[0])
    if wishes.with_optimizer:
        step = one_number("step", optimizers[0].get("base_optimizer_state_step"))  # DeepSpeed's elastic form
        _note_optimizer(state, param_groups(optimizers[0], model.where), groups, step, left_out)
    return stage, shards


def _taken_apart(
    zero: Path, model: ModelStates, wishes: Wishes, state: dict[str, Any], left_out: list[str]
) -> list[list[Slice]]:
    found = read_universal(zero, model, wishes, state, left_out)
    shapes = {part.name.removeprefix("param/"): part.shape for part in found if part.name.startswith("param/")}
    model.check_shapes(shapes)
    rows = model.weights(set(shapes), sharded=any(model.tensors[name].numel == 0 for name in shapes))
    return [rows[0] + found, *rows[1:]]


def _note_optimizer(
    state: dict[str, Any],
    settings: Sequence[State],
    groups: Sequence[FlatGroup],
    common: Mapping[str, float],
    left_out: list[str],
) -> None:
    """``common``: numbers that hold for all groups that have none of their own."""
    scalars: dict[str, dict[str, float]] = {}
    for group in groups:
        scalars.setdefault(str(group.group), dict(common)).update(group.scalars)
    count = len(settings) or 1 + max((group.group for group in groups), default=-1)
    state["groups"] = facts.group_settings(settings, left_out) or [{} for _ in range(count)]
    state["optimizer"] = facts.identity(settings, state["ds_config"])
    state["scalars"] = {key: row for key, row in scalars.items() if row}
    state["kinds"] = sorted({kind for group in groups for kind in group.states})


def _whole(model: ModelStates, wishes: Wishes, state: dict[str, Any], left_out: list[str]) -> list[list[Slice]]:
    """Stage 0: the optimizer is in the model's file. Without one there, the weights alone."""
    placeholders = {name for name, tensor in model.tensors.items() if tensor.numel == 0}
    if any(prod(shape) > 0 and name in placeholders for name, shape in model.frozen_shapes().items()):
        raise CheckpointError("this is a checkpoint of ZeRO stage 3 without its optimizer files", where=model.where)
    content = model.first.get("optimizer")
    if not isinstance(content, dict) or not content:
        if model.first.get("param_shapes"):
            left_out.append("the optimizer's state: there are no files *_optim_states.pt")
        return model.weights(set(), sharded=bool(model.first.get("param_shapes")))
    state["loss_scaler"] = facts.loss_scaler(content)
    if not wishes.with_optimizer:
        if "fp32_groups" in content or "fp32_groups_flat" in content:
            left_out.append(
                "the masters in fp32, which belong to the optimizer: weights have the parameters' own dtype"
            )
        return model.weights(set(), sharded=False)
    optimizer = NumberedOptimizer(content, model, wishes)
    found = optimizer.slices()
    state["groups"] = facts.group_settings(optimizer.groups, left_out)
    state["optimizer"] = facts.identity(optimizer.groups, state["ds_config"])
    state["scalars"] = optimizer.scalars()
    state["kinds"] = optimizer.kinds
    mastered = {name for row in optimizer.names for name, _ in row} if optimizer.has_masters() else set()
    rows = model.weights(mastered, sharded=False)
    return [rows[0] + found]


def _state(model: ModelStates, left_out: list[str]) -> dict[str, Any]:
    content = model.first
    config = facts.plain_or_none(content.get("ds_config"), "ds_config", left_out)
    return fresh_state() | {
        "counters": facts.counters(content),
        "scheduler": facts.plain_or_none(content.get("lr_scheduler"), "lr_scheduler", left_out),
        "aliases": dict(model.aliases),
        "ds_config": config if isinstance(config, dict) else {},
        "client": facts.client_state(content, left_out),
    }


def _ranks(content: State) -> int:
    """How many ranks saved, where their number is not that of the files."""
    found = content.get("dp_world_size")
    return found if type(found) is int and found > 0 else 1


def _dict(file: TorchFile) -> State:
    if not isinstance(file.content, dict):
        raise CheckpointError(
            "not a file of DeepSpeed", where=str(file.path), got=type(file.content).__name__, expected="a dict"
        )
    return file.content


def _inner(file: TorchFile) -> State:
    found = _dict(file).get("optimizer_state_dict")
    if not isinstance(found, dict):
        raise CheckpointError("there is no optimizer_state_dict", where=str(file.path))
    return found
