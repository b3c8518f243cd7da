"""A checkpoint that DeepSpeed's own converter has taken apart: one folder per parameter, one file per kind of its state."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from zero_trial.checkpoint.slice import Slice
from zero_trial.errors import CheckpointError
from zero_trial.importing import facts
from zero_trial.importing.findings import Wishes
from zero_trial.importing.model_states import ModelStates
from zero_trial.importing.shards import group_of_buffer, one_number, shapes_of
from zero_trial.importing.torch_file import TorchFile
from zero_trial.importing.values import Stored

COMMON = "optimizer_state.pt"


def read_universal(
    zero: Path, model: ModelStates, wishes: Wishes, state: dict[str, Any], left_out: list[str]
) -> list[Slice]:
    """Masters and moments of every trained parameter, whole; ``state`` gets what belongs to them. Raises CheckpointError."""
    common = TorchFile(zero / COMMON).content if (zero / COMMON).is_file() else {}
    if not isinstance(common, dict):
        raise CheckpointError("not a dict", where=str(zero / COMMON), got=type(common).__name__)
    buffers = shapes_of(model.first, wishes, model.where)
    inner = (
        common
        if "param_groups" in common
        else common.get("optimizer_state_dict", common.get("base_optimizer_state", {}))
    )
    settings = facts.optimizer_groups(inner, str(zero / COMMON))
    home = group_of_buffer(settings, len(buffers))
    found: list[Slice] = []
    scalars: dict[str, dict[str, float]] = {}
    for index, shapes in enumerate(buffers):
        own = scalars.setdefault(str(home[index]), {})
        own |= one_number("step", settings[home[index]].get("step")) if home[index] < len(settings) else {}
        for name, shape in shapes.items():
            slices, numbers = _of_parameter(_folder(zero, name, wishes), name, shape, wishes.with_optimizer)
            found += slices
            own |= numbers
    if wishes.with_optimizer:
        kinds = sorted({part.name.split("/")[1] for part in found if part.name.startswith("state/")})
        _steps(scalars, inner, home, state)
        state["groups"] = facts.group_settings(settings, left_out) or [{} for _ in range(max(home, default=-1) + 1)]
        state["optimizer"] = facts.identity(settings, state["ds_config"])
        state["scalars"] = {key: row for key, row in scalars.items() if row}
        state["kinds"] = kinds
    state["loss_scaler"] = facts.loss_scaler(common)
    return found


def _folder(zero: Path, name: str, wishes: Wishes) -> Path:
    """The folder has the name with its prefix, where it had one."""
    prefixed = zero / (wishes.strip + name)
    return prefixed if prefixed.is_dir() else zero / name


def _steps(scalars: dict[str, dict[str, float]], inner: Any, home: list[int], state: Mapping[str, Any]) -> None:
    """Stage 3 leaves the step in what is common to all parameters, or nowhere: then it is the number of steps that were applied."""
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
        raise CheckpointError("there are no values of a parameter", where=str(folder), got="no fp32.pt")
    for kind, path in files.items() if with_state else [("fp32", files["fp32"])]:
        content = TorchFile(path).content
        value = content.get("param") if isinstance(content, dict) else content
        if isinstance(value, Stored) and value.numel == prod(shape) and kind != "step":
            place = "param" if kind == "fp32" else f"state/{kind}"
            slices.append(Slice.whole(f"{place}/{name}", value.tensor().reshape(shape)))
        elif number := one_number(kind, value):
            numbers |= number
        else:
            got = f"shape {value.shape}" if isinstance(value, Stored) else type(value).__name__
            raise CheckpointError("not this parameter's state", where=str(path), got=got, expected=shape)
    return slices, numbers
