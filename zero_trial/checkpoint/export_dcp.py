"""Write a checkpoint as a folder of torch.distributed.checkpoint, for FSDP2 and torchtitan.

    model.<name>                              parameters (masters where there are any) and buffers
    optimizer.state.<name>.<kind>             moments and step
    optimizer.param_groups.0.<setting>        as torch.distributed.checkpoint.state_dict gives them

What ``get_state_dict`` asks for is there: settings that this project's optimizers do not have get
torch's defaults. Memory: all that is written, at once.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from zero_trial.checkpoint.format import TensorKind, parse_stored_name
from zero_trial.checkpoint.reader import CheckpointReader
from zero_trial.checkpoint.state_tree import decode_state
from zero_trial.errors import CheckpointError, ConfigError

_TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def dcp_state(reader: CheckpointReader, *, with_optimizer: bool = True) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}`` as ``get_state_dict`` of torch does. Raises
    CheckpointError for what that form cannot hold."""
    where, state = str(reader.folder), decode_state(reader.manifest.state, reader.read)
    model: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    for stored in reader.shapes:
        found = parse_stored_name(stored)
        if found.parts > 1:
            raise CheckpointError("the model is parallel itself", where=where, got=f"{found.parts} parts")
        if found.kind in (TensorKind.PARAM, TensorKind.BUFFER):
            model[found.name] = reader.read(stored)
        elif found.kind is TensorKind.STATE and with_optimizer:
            moments.setdefault(found.name, {})[found.state] = reader.read(stored)
    model |= {alias: model[name] for alias, name in state["aliases"].items() if name in model}
    if not with_optimizer or not state["groups"]:
        return {"model": model}
    return {"model": model, "optimizer": _optimizer(state, moments, where)}


def _optimizer(state: Mapping[str, Any], moments: dict[str, dict[str, Any]], where: str) -> dict[str, Any]:
    if len(state["groups"]) > 1:
        raise CheckpointError(
            "a checkpoint does not say which parameter is in which optimizer group",
            where=where,
            got=f"{len(state['groups'])} groups",
            fix="Export with --no-optimizer.",
        )
    if state.get("whole_states"):
        raise CheckpointError(
            "this optimizer's state is not one value per element", where=where, fix="Export with --no-optimizer."
        )
    (group,) = state["groups"]
    step = state["scalars"].get("0", {}).get("step")
    if step is not None:
        for own in moments.values():
            own["step"] = torch.tensor(float(step))
    kind = str((state["optimizer"] or {}).get("class", "")).lower().removeprefix("fused")
    defaults = _TORCH[kind]([torch.zeros(1)]).defaults if kind in _TORCH else {}
    settings = {**defaults, **{key: value for key, value in group.items() if key in defaults or not defaults}}
    return {"state": moments, "param_groups": [{**settings, "params": sorted(moments)}]}


def write_dcp(reader: CheckpointReader, out: Path, *, with_optimizer: bool = True) -> dict[str, int]:
    """Write ``out``, a new folder, and return its files with their sizes. Raises ConfigError where
    there is something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("it exists already", where=str(out), expected="a new or an empty folder")
    state = dcp_state(reader, with_optimizer=with_optimizer)
    partial = out.with_name(f"{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this is one process
            save(state, checkpoint_id=partial, no_dist=True)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {str(path): path.stat().st_size for path in sorted(out.iterdir())}
