"""Read a checkpoint into an engine, on any number of ranks and at any ZeRO stage; see
:mod:`zero_trial.engine.saving` for its content.

On the same number of ranks, a resumed run is bit-identical to an uninterrupted run. For other
numbers of ranks see :func:`_read_rank_state`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.folder import FoundCheckpoint, checkpoint_folder, list_checkpoints
from zero_trial.checkpoint.format import MANIFEST_NAME, Slice, dtype_name
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.state_tree import decode_state, restore_rng
from zero_trial.comm import AxisComm, fail_together
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.saving import COUNTERS, CheckpointNames, frozen_names, state_at_hand, stored_parts
from zero_trial.errors import CheckpointError, TrialError
from zero_trial.ops.plain import FORMATS
from zero_trial.sharding.ema import KIND
from zero_trial.sharding.grouping import parameter_names
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.util.text import listed

log = logging.getLogger("zero_trial")

_AFRESH = "Load with load_optimizer_states=False to start with fresh optimizer state."
_STATE_KEYS = {
    *("counters", "loss_scaler", "scheduler", "optimizer", "groups"),
    *("scalars", "kinds", "reduction_order", "client"),
}


def refuse_function(custom_load_fn: Any, where: str) -> None:
    """Raise TrialError for DeepSpeed's argument ``custom_load_fn``."""
    if custom_load_fn is not None:
        raise TrialError(
            "custom_load_fn is not supported",
            where=where,
            fix="Load into engine.module inside GatheredParameters instead.",
        )


def load_state(
    engine: EngineAccessors,
    directory: Path,
    tag: str | None,
    *,
    strict: bool = True,
    with_optimizer: bool = True,
    with_schedule: bool = True,
    with_counters: bool = True,
) -> tuple[str | None, dict[str, Any] | None]:
    """Read ``directory/tag``, or the newest intact checkpoint: ``(path, client_state)``, or
    ``(None, None)`` if there is none.

    Collective over the world: every rank must call. Raises CheckpointError on every rank.
    """
    with state_at_hand(engine, "load_checkpoint called by every rank"):
        world, optimizer = engine.mesh.world, engine.optimizer
        reader = find_checkpoint(world, directory, None if tag is None else str(tag))
        if reader is None:
            return None, None
        fail_together(world, lambda: _require_same_parts(engine, reader), "open checkpoint")
        state = fail_together(world, lambda: engine_state(reader), "engine state")
        engine.sharded.wait_before_writing()
        fail_together(world, lambda: _read_weights(engine, reader, strict, state), "read weights")
        engine.zero_grad()
        if with_optimizer and optimizer is not None:
            fail_together(world, lambda: _read_optimizer(engine, optimizer, reader, state), "read optimizer state")
        elif optimizer is not None and optimizer.ema is not None:
            optimizer.ema.restart(optimizer.base.state, 0)
        engine.sharded.publish(frozen=True)
        if with_schedule and state["scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
            fail_together(world, lambda: engine.lr_scheduler.load_state_dict(state["scheduler"]), "read lr schedule")
        if with_counters:
            fail_together(world, lambda: _take_counters(engine, state), "read counters")
            fail_together(world, lambda: _read_rank_state(engine, reader), "read rank state")
    return str(reader.folder), state["client"]


def find_checkpoint(world: AxisComm, directory: Path, tag: str | None) -> CheckpointReader | None:
    """Open ``directory/tag``, or the newest intact checkpoint; return None, with a warning, if
    there is none at all. Collective.

    Each rank hashes its share of the files, so that no rank waits for another to read a whole
    checkpoint. Raises CheckpointError if ``tag`` is damaged, or all checkpoints are, because the
    user did not intend to start from scratch.
    """
    listed = fail_together(
        world, lambda: _candidates(directory, tag) if world.index == 0 else ([], []), "find checkpoint"
    )
    folders, faults = world.gather_json(listed, "find checkpoint")[0]
    reader = None
    for folder in map(Path, folders):
        fault = None
        try:
            reader = CheckpointReader(folder)
            reader.verify(world.index, world.size)
        except (CheckpointError, OSError) as error:
            fault = str(error)
        found = [text for text in world.gather_json(fault, "verify checkpoint") if text is not None]
        if not found:
            break
        if tag is not None:
            raise CheckpointError(found[0])
        reader = None
        faults.append(found[0])
    for fault in faults if world.index == 0 else ():
        log.warning("passed over: %s", fault)
    if reader is None and faults:
        raise CheckpointError(
            "no checkpoint is intact",
            where=str(directory),
            got=faults[-1],
            fix="Load from another folder, or move the damaged checkpoints away to start from scratch.",
        )
    if reader is None and world.index == 0:
        log.warning("there is no checkpoint in %s: nothing is loaded", directory)
    return reader


def _candidates(directory: Path, tag: str | None) -> tuple[list[str], list[str]]:
    """List the folders to try, newest first, and the damaged ones. Raises CheckpointError."""
    refuse_deepspeed(directory, tag)
    if tag is not None:
        return [str(checkpoint_folder(directory, tag))], []
    if (directory / MANIFEST_NAME).is_file():  # the user did not intend to start from scratch
        raise CheckpointError(
            "this is a checkpoint, not a folder of checkpoints",
            where=f"load_checkpoint({str(directory)!r})",
            fix=f"Call load_checkpoint({str(directory.parent)!r}, tag={directory.name!r}).",
        )
    if directory.is_file():
        fix = "Load weights before initialize(), with model.load_state_dict(). zero-trial ckpt import converts a checkpoint."
        where = f"load_checkpoint({str(directory)!r})"
        raise CheckpointError("this is a file, not a folder of checkpoints", where=where, fix=fix)
    faults: list[str] = []
    found = list_checkpoints(directory, faults.append)
    if found:
        highest, last = found[-1], max(found, key=_saved_at)
        if _saved_at(last) > _saved_at(highest):
            log.warning(
                "%s: %r has the highest step and is loaded, but %r was saved later. If two runs save into this folder, "
                "pass tag=%r to load the other one, and give each run its own folder.",
                directory, highest.tag, last.tag, last.tag,
            )  # fmt: skip
    return [str(each.folder) for each in reversed(found)], faults


def _saved_at(found: FoundCheckpoint) -> float:
    return (found.folder / MANIFEST_NAME).stat().st_mtime


def _require_same_parts(engine: EngineAccessors, reader: CheckpointReader) -> None:
    parts, own = reader.manifest.world.get("model_parts", 1), CheckpointNames(engine).parts
    if parts != own:
        raise CheckpointError(
            "the checkpoint's model was split into a different number of parallel parts",
            where=str(reader.folder),
            got=parts,
            expected=own,
            fix=f"Start with mesh.model: {parts}. Only the code of a model that is parallel itself can join its parts.",
        )


def _take_counters(engine: EngineAccessors, state: Mapping[str, Any]) -> None:
    """Restore the counts of steps, the loss scale and the order of reductions."""
    engine.restore_progress(state["counters"], state["loss_scaler"])
    engine.sharded.reducer.set_order(state["reduction_order"])


def _read_weights(engine: EngineAccessors, reader: CheckpointReader, strict: bool, state: Mapping[str, Any]) -> None:
    """Read parameters and buffers. A checkpoint saved without frozen parameters must contain all
    others; the frozen ones keep the model's values."""
    names = CheckpointNames(engine)
    known = reader.shapes
    wanted: dict[str, tuple[int, ...]] = {
        names.param(name): tuple(param.shape) for name, (param, _) in parameter_names(engine.module).items()
    }
    buffers = dict(names.buffers())
    wanted |= {names.buffer(name): tuple(buffer.shape) for name, buffer in buffers.items()}
    left_out = sorted(names.param(name) for name in frozen_names(engine)) if state.get("without_frozen") else []
    for stage, frozen in engine.mesh.pipe.gather_json([wanted, left_out], "parts of the model"):
        wanted |= {name: tuple(shape) for name, shape in stage.items()}
        wanted = {name: shape for name, shape in wanted.items() if name in known or name not in frozen}
    for prefix in (names.param(""), names.buffer("")):
        mine = {name: shape for name, shape in wanted.items() if name.startswith(prefix)}
        reader.require(mine, prefix, allow_missing=not strict, allow_extra=not strict)
    slices = [part.slice() for part in stored_parts(engine) if part.kind == "master"]
    managed = {id(param) for group in engine.sharded.groups for param in group.params}
    rest = {names.buffer(name): buffer for name, buffer in buffers.items()}
    rest |= {
        names.param(name): param.data
        for name, (param, _) in parameter_names(engine.module).items()
        if id(param) not in managed
    }
    flat = {name: tensor.contiguous() for name, tensor in rest.items()}  # a copy if not contiguous
    slices += [Slice.whole(name, tensor) for name, tensor in flat.items()]
    _warn_of_rounding(engine, reader, slices)
    with torch.no_grad():
        reader.read_into([part for part in slices if part.name in known])
        for name, tensor in rest.items():
            if not tensor.is_contiguous():
                tensor.copy_(flat[name])


def _warn_of_rounding(engine: EngineAccessors, reader: CheckpointReader, slices: list[Slice]) -> None:
    stored = reader.manifest.tensors
    rounded = sorted(
        part.name
        for part in slices
        if part.name in stored and stored[part.name].dtype == "float64" != dtype_name(part.dtype)
    )
    if rounded and engine.mesh.rank == 0:
        log.warning("the checkpoint's float64 values of %s are rounded to float32", listed(rounded, 1))


def _read_optimizer(
    engine: EngineAccessors, optimizer: ShardedOptimizer, reader: CheckpointReader, state: Mapping[str, Any]
) -> None:
    names = CheckpointNames(engine)
    _require_same_optimizer(optimizer, reader, state, engine.mesh.rank)
    # counters in the groups of a class of the same name (schedule-free's k) may only appear with
    # its first step
    same_class = (
        state["optimizer"] is not None and state["optimizer"]["class"] == optimizer.state_by_tensor.identity()["class"]
    )
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(
            {
                key: value
                for key, value in saved.items()
                if (same_class or key in group) and key not in ("fused", "foreach", "capturable")
            }
        )
    known = reader.shapes
    whole = _whole_states(engine, optimizer, reader, state.get("whole_states", {}))
    kinds = _read_average(optimizer, reader, state, whole, engine.mesh.rank)
    optimizer.state_by_tensor.make_state(
        kinds, state["scalars"], lambda kind, name: known.get(names.state(kind, name)), whole
    )
    slices = [part.slice() for part in stored_parts(engine) if part.kind != "master" and part.name not in whole]
    absent = sorted({part.name for part in slices} - known.keys())
    if absent:
        raise CheckpointError(
            "the checkpoint lacks optimizer state",
            where=str(reader.folder),
            got=f"none for {listed(absent, 1)}",
            fix=_AFRESH,
        )
    reader.read_into(slices)


def _read_average(
    optimizer: ShardedOptimizer,
    reader: CheckpointReader,
    state: Mapping[str, Any],
    whole: Mapping[str, dict[str, Any]],
    rank: int,
) -> list[str]:
    """Restore the number of steps in the moving average of the weights; return the kinds of state
    to read, without the average if this engine does not track one."""
    ema, saved, kinds = optimizer.ema, state.get("ema"), list(state["kinds"])
    if saved is not None and ema is None:
        for own in whole.values():
            own.pop(KIND, None)
        return [kind for kind in kinds if kind != KIND]
    if ema is not None:
        ema.restart({}, None if saved is None else saved["steps"])
        if saved is None and rank == 0:
            log.info("%s has no average of the weights (ema): it starts from the loaded weights", reader.folder)
    return kinds


def _whole_states(
    engine: EngineAccessors, optimizer: ShardedOptimizer, reader: CheckpointReader, saved: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Read the state of the tensors that this rank updates whole, if it was saved whole: by name,
    on its target device."""
    names, found = CheckpointNames(engine), {}
    for name in optimizer.state_by_tensor.whole_names:
        own = saved.get(names.param(name))
        if own is None:
            continue

        def fetch(kind: str, name: str = name, own: Mapping[str, Any] = own) -> torch.Tensor:
            value = reader.read(names.state(kind, name))
            if kind in own["strides"]:
                value = torch.empty_strided(value.shape, own["strides"][kind], dtype=value.dtype).copy_(value)
            return value.to(engine.device) if value.dim() or kind in own["on_device"] else value

        found[name] = decode_state(own["state"], fetch)
    return found


def _require_same_optimizer(
    optimizer: ShardedOptimizer, reader: CheckpointReader, state: Mapping[str, Any], rank: int
) -> None:
    mine, stored = optimizer.state_by_tensor.identity(), state["optimizer"]
    if stored is not None and mine["settings"] != stored["settings"]:
        raise CheckpointError(
            "the checkpoint holds the state of a different optimizer",
            where=str(reader.folder),
            got=stored["class"],
            expected=mine["class"],
            fix=_AFRESH,
        )
    saved, own = ((facts or {}).get("states", "fp32") for facts in (stored, mine))
    if saved not in FORMATS:
        raise CheckpointError(
            "the checkpoint stores optimizer states in an unsupported format",
            where=str(reader.folder),
            got=saved,
            expected=" or ".join(FORMATS),
            fix=_AFRESH,
        )
    if saved != own and rank == 0:
        log.info("the checkpoint's %s optimizer states are converted to %s", saved, own)
    if len(state["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            "the checkpoint has a different number of optimizer groups",
            where=str(reader.folder),
            got=len(state["groups"]),
            expected=len(optimizer.param_groups),
            fix=_AFRESH,
        )


def _read_rank_state(engine: EngineAccessors, reader: CheckpointReader) -> None:
    """Restore this rank's random generators, and its own values of buffers that differ between
    ranks.

    Rank r restores the generators of saved rank r: torch's, CUDA's, Python's and numpy's. On more
    ranks than in the checkpoint, all ranks keep the generators of this run's seed, because two
    ranks must not draw the same numbers, and a generator that all ranks share must stay shared.
    Such buffers are only restored on the same number of ranks; otherwise they get rank 0's values.
    """
    saved, rank, size = reader.manifest.rank_state, engine.mesh.rank, engine.mesh.world.size
    lost = ["random generators start from this run's seed"] if len(saved) < size else []
    if names := sorted({name for own in saved for name in own["buffers"]}):
        lost.append(f"buffers that differ between ranks get rank 0's values: {', '.join(names)}")
    if rank == 0 and lost and len(saved) != size:
        log.warning("checkpoint of %d ranks loaded on %d: %s", len(saved), size, "; ".join(lost))
    if len(saved) < size:
        return
    own = decode_state(saved[rank], reader.read)
    if len(saved) == size:
        buffers = dict(CheckpointNames(engine).buffers())
        for name, value in own["buffers"].items():
            # else the model no longer has it, and the caller loads with load_module_strict=False
            if name in buffers:
                buffers[name].copy_(value)
    restore_rng(own["rng"], engine.device)


def refuse_deepspeed(directory: Path, tag: str | None) -> None:
    """Raise CheckpointError for DeepSpeed's saves, which the run was meant to continue from."""
    folder = directory / (tag or "")
    if not folder.is_dir() or (folder / MANIFEST_NAME).is_file():
        return
    pattern = "*_model_states.pt" if tag is not None else "*/*_model_states.pt"
    if next(folder.glob(pattern), None) is not None and not any(directory.glob(f"*/{MANIFEST_NAME}")):
        raise CheckpointError(
            "this is a checkpoint of DeepSpeed",
            where=str(folder),
            fix=f"Convert it: zero-trial ckpt import {directory} NEW_FOLDER, and load the result.",
        )


def engine_state(reader: CheckpointReader) -> dict[str, Any]:
    """Decode the engine's own state. Raises CheckpointError if no engine wrote it."""
    state = decode_state(reader.manifest.state, reader.read)
    counters = state.get("counters") if isinstance(state, dict) and state.keys() >= _STATE_KEYS else None
    if not isinstance(counters, dict) or not all(isinstance(counters.get(name), int) for name in COUNTERS):
        raise CheckpointError("this checkpoint was not written by an engine", where=str(reader.folder))
    return dict(state)
