"""Write a checkpoint as a folder of torch.distributed.checkpoint, for FSDP2 and torchtitan.

    model.<name>                              parameters (masters if they exist) and buffers
    optimizer.state.<name>.<kind>             moments and step
    optimizer.param_groups.<i>.<setting>      as torch.distributed.checkpoint.state_dict names them

The folder has all that ``get_state_dict`` asks for: settings that this project's optimizers do not
have get torch's defaults. Memory: the largest tensor.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from zero_trial.checkpoint.format import TensorKind, dtype_of, parse_stored_name
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.state_tree import decode_state
from zero_trial.errors import CheckpointError, ConfigError

_TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def dcp_state(
    reader: CheckpointReader, *, with_optimizer: bool = True, load: Callable[[str], torch.Tensor] | None = None
) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}`` as torch's ``get_state_dict`` does. Raises
    CheckpointError for values that this format cannot hold.

    ``load``: returns a stored tensor of weights or state by name, instead of ``reader.read``.
    """
    load = load if load is not None else reader.read
    where, state = str(reader.folder), decode_state(reader.manifest.state, reader.read)
    model: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    for stored in reader.shapes:
        found = parse_stored_name(stored)
        if found.parts > 1:
            raise CheckpointError("the model is parallel itself", where=where, got=f"{found.parts} parts")
        if found.kind in (TensorKind.PARAM, TensorKind.BUFFER):
            model[found.name] = load(stored)
        elif found.kind is TensorKind.STATE and with_optimizer:
            moments.setdefault(found.name, {})[found.state] = load(stored)
    model |= {alias: model[name] for alias, name in state["aliases"].items() if name in model}
    if not with_optimizer or not state["groups"]:
        return {"model": model}
    return {"model": model, "optimizer": _optimizer(state, moments, where)}


def _optimizer(state: Mapping[str, Any], moments: dict[str, dict[str, Any]], where: str) -> dict[str, Any]:
    groups: Sequence[Mapping[str, Any]] = state["groups"]
    named = [sorted(moments)] if len(groups) == 1 else state.get("names_of_groups")
    if named is None:
        raise CheckpointError(
            "this checkpoint does not record which parameter is in which optimizer group: an older version wrote it",
            where=where,
            got=f"{len(groups)} groups",
            fix="Load it and save it again, or export with --no-optimizer.",
        )
    if state.get("whole_states"):
        raise CheckpointError(
            "this optimizer's state is not one value per element", where=where, fix="Export with --no-optimizer."
        )
    kind = str((state["optimizer"] or {}).get("class", "")).lower().removeprefix("fused")
    defaults = _TORCH[kind]([torch.zeros(1)]).defaults if kind in _TORCH else {}
    param_groups = []
    for index, (group, names) in enumerate(zip(groups, named, strict=True)):
        step = state["scalars"].get(str(index), {}).get("step")
        for name in names if step is not None else ():
            if name in moments:
                moments[name]["step"] = torch.tensor(float(step))
        settings = {**defaults, **{key: value for key, value in group.items() if key in defaults or not defaults}}
        param_groups.append({**settings, "params": list(names)})
    return {"state": moments, "param_groups": param_groups}


class _OneByOne(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each when it is written. The previous one is
    emptied then, because torch keeps all tensors of a file until its end."""

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__()
        self._reader = reader
        self._stored: dict[int, str] = {}  # by id of the tensor on the meta device
        self._last: torch.Tensor | None = None

    def promise(self, stored: str) -> torch.Tensor:
        """Return a tensor of the stored one's shape and dtype, without values."""
        entry = self._reader.manifest.tensors[stored]
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
        self._stored[id(tensor)] = stored
        return tensor

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
            self._last = None
        if (stored := self._stored.get(id(found))) is not None:
            found = self._last = self._reader.read(stored)
        return found


def write_dcp(reader: CheckpointReader, out: Path, *, with_optimizer: bool = True) -> dict[str, int]:
    """Write the new folder ``out``; return its files with their sizes. Raises ConfigError if
    ``out`` exists."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("the output folder is not empty", where=str(out), expected="a new or an empty folder")
    planner = _OneByOne(reader)
    state = dcp_state(reader, with_optimizer=with_optimizer, load=planner.promise)
    partial = out.with_name(f"{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about a single process
            # no copies in advance, so that tensors are requested one by one
            writer = FileSystemWriter(partial, per_thread_copy_ahead=0)
            save(state, storage_writer=writer, planner=planner, no_dist=True)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {str(path): path.stat().st_size for path in sorted(out.iterdir())}
