"""What an engine's checkpoint holds: the names of its logical tensors, and which of them this rank's part of the model has.

    param/<name>           every parameter; its master where there is one
    state/<kind>/<name>    optimizer state with one value per element (exp_avg ...)
    buffer/<name>          buffers of the first rank that has them
    rank<i>/...            what differs between ranks: random generators, buffers that are not the first rank's

Nothing names a shard. Where models are parallel themselves (``mesh.model``, or a client's ``mpu`` with several data-parallel groups) ranks hold other
tensors under the same names; then the first three stand below ``part<i>of<n>/``, and are read only by as many parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_trial.checkpoint import CheckpointReader, Slice, latest_checkpoint
from zero_trial.checkpoint.folder import checkpoint_folder
from zero_trial.checkpoint.format import MANIFEST_NAME, dtype_name
from zero_trial.checkpoint.state_tree import decode_state, restore_rng
from zero_trial.comm import AxisComm
from zero_trial.comm.failures import fail_together
from zero_trial.errors import CheckpointError, ZeroTrialError
from zero_trial.sharding.grouping import parameter_names

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine


class CheckpointNames:
    """The names and tensors of ``engine`` as they are now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.part, self.parts = engine.mesh.model_part
        self._place = f"part{self.part}of{self.parts}/" if self.parts > 1 else ""

    def param(self, name: str) -> str:
        return f"{self._place}param/{name}"

    def state(self, kind: str, name: str) -> str:
        return f"{self._place}state/{kind}/{name}"

    def buffer(self, name: str) -> str:
        return f"{self._place}buffer/{name}"

    @property
    def twins(self) -> AxisComm:
        """The ranks that have built the same modules: all, or those of one pipeline stage and one part of a parallel model."""
        mesh = self._engine.mesh
        return mesh.data if mesh.pipe.size > 1 or self.parts > 1 else mesh.world

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The persistent buffers: those that a state dict would hold."""
        found = []
        for prefix, module in self._engine.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found.append((f"{prefix}.{name}" if prefix else name, buffer))
        return found

    def aliases(self) -> dict[str, str]:
        """Tied names of the whole model, or of this part of it. Collective over pipe."""
        own = {alias: name for name, (_, names) in parameter_names(self._engine.module).items() for alias in names[1:]}
        stages = self._engine.mesh.pipe.gather_json(own, "tied names")
        return {alias: name for stage in stages for alias, name in stage.items()}

    def dtypes(self) -> dict[str, str]:
        """In which dtype the model computes with a parameter, for those that are not float32: masters do not tell. Collective over pipe."""
        named = parameter_names(self._engine.module).items()
        own = {name: dtype_name(param.dtype) for name, (param, _) in named if param.dtype != torch.float32}
        return {
            name: kind for stage in self._engine.mesh.pipe.gather_json(own, "dtypes") for name, kind in stage.items()
        }


# Reads a checkpoint into an engine, on any number of ranks and at any ZeRO stage.
#
# Random generators are put back when the number of ranks is the same; then a resumed run has the bits of the unbroken one.


log = logging.getLogger("zero_trial")


COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class StateLoader:
    """Loading into one engine. Every method is collective over the world: every rank must call it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._contents = CheckpointNames(engine)

    def load(
        self,
        directory: Path,
        tag: str | None,
        strict: bool,
        with_optimizer: bool,
        with_schedule: bool,
        with_counters: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads ``directory/tag``, or the newest checkpoint that verifies; ``(None, None)`` if there is none."""
        engine = self._engine
        found = self._find(directory, None if tag is None else str(tag))
        if found is None:
            return None, None
        folder, verified = found
        reader = fail_together(engine.mesh.world, lambda: self._open(folder, verified), "open checkpoint")
        state = fail_together(engine.mesh.world, lambda: engine_state(reader), "engine state")
        engine.sharded.settle()
        fail_together(engine.mesh.world, lambda: self._read_weights(reader, strict), "read weights")
        engine.zero_grad()
        if with_optimizer and engine.optimizer is not None:
            fail_together(engine.mesh.world, lambda: self._read_optimizer(reader, state), "read optimizer state")
        engine.sharded.publish()
        engine.sharded.publish_frozen()
        engine.sharded.wait()
        if with_schedule and state["scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
            fail_together(
                engine.mesh.world, lambda: engine.lr_scheduler.load_state_dict(state["scheduler"]), "read lr schedule"
            )
        if with_counters:
            fail_together(engine.mesh.world, lambda: self._take_counters(state), "read counters")
            fail_together(engine.mesh.world, lambda: self._read_own(reader), "read rank state")
        return str(folder), state["client"]

    def _take_counters(self, state: Mapping[str, Any]) -> None:
        """Counts of steps, loss scale and the order of reductions."""
        engine = self._engine
        for name in COUNTERS:
            setattr(engine, name, state["counters"][name])
        if engine.micro_steps % engine.gradient_accumulation_steps():  # saved with another accumulation
            engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        engine.loss_scaler = engine.loss_scaler.restored(state["loss_scaler"])
        engine.sharded.reducer.take_order(state["reduction_order"])

    def _find(self, directory: Path, tag: str | None) -> tuple[Path, bool] | None:
        """Where the checkpoint is, the same answer on every rank, and whether rank 0 has verified its sums already."""
        answer: dict[str, Any] = {}
        if self._engine.mesh.rank == 0:
            try:
                refuse_deepspeed(directory, tag)
                if tag is not None:
                    answer = {"folder": str(checkpoint_folder(directory, tag))}
                else:
                    newest = newest_intact(directory)
                    answer = {"folder": str(newest) if newest is not None else None}
            except (ZeroTrialError, OSError) as fault:
                answer = {"fault": str(fault)}
        answer = self._engine.mesh.world.gather_json(answer, "find checkpoint")[0]
        if "fault" in answer:
            raise CheckpointError(answer["fault"])
        return (Path(answer["folder"]), tag is None) if answer["folder"] is not None else None

    def _open(self, folder: Path, verified: bool) -> CheckpointReader:
        reader = CheckpointReader(folder)
        if not verified:
            reader.verify(self._engine.mesh.world.index, self._engine.mesh.world.size)
        parts = reader.manifest.world.get("model_parts", 1)
        if parts != self._contents.parts:
            raise CheckpointError(
                "the checkpoint holds a model in another number of parallel parts",
                where=str(folder),
                got=parts,
                expected=self._contents.parts,
                fix=f"Start with mesh.model: {parts}. Parts of a model that is parallel itself can only be joined by its own code.",
            )
        return reader

    def _read_weights(self, reader: CheckpointReader, strict: bool) -> None:
        engine, names = self._engine, self._contents
        known = reader.shapes
        wanted: dict[str, tuple[int, ...]] = {
            names.param(name): tuple(param.shape) for name, (param, _) in parameter_names(engine.module).items()
        }
        buffers = dict(names.buffers())
        wanted |= {names.buffer(name): tuple(buffer.shape) for name, buffer in buffers.items()}
        for stage in engine.mesh.pipe.gather_json(wanted, "parts of the model"):
            wanted |= {name: tuple(shape) for name, shape in stage.items()}
        for prefix in (names.param(""), names.buffer("")):
            mine = {name: shape for name, shape in wanted.items() if name.startswith(prefix)}
            reader.require(mine, prefix, allow_missing=not strict, allow_extra=not strict)
        slices: list[Slice] = []
        managed: set[int] = set()
        for unit in engine.sharded.groups:
            managed.update(id(param) for param in unit.params)
            for piece in unit.layout.pieces(unit.comm.index):
                part = unit.master[piece.offset : piece.offset + piece.numel]
                slices.append(Slice(names.param(piece.slot.name), piece.slot.shape, piece.start, piece.stop, part))
        rest = {names.buffer(name): buffer for name, buffer in buffers.items()}
        rest |= {
            names.param(name): param.data
            for name, (param, _) in parameter_names(engine.module).items()
            if id(param) not in managed
        }
        flat = {name: tensor.contiguous() for name, tensor in rest.items()}  # a copy, where it is not
        slices += [Slice.whole(name, tensor) for name, tensor in flat.items()]
        self._say_rounding(reader, slices)
        with torch.no_grad():
            reader.read_into([part for part in slices if part.name in known])
            for name, tensor in rest.items():
                if not tensor.is_contiguous():
                    tensor.copy_(flat[name])

    def _say_rounding(self, reader: CheckpointReader, slices: list[Slice]) -> None:
        stored = reader.manifest.tensors
        rounded = sorted(
            part.name
            for part in slices
            if part.name in stored and stored[part.name].dtype == "float64" != dtype_name(part.dtype)
        )
        if rounded and self._engine.mesh.rank == 0:
            more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
            log.warning("the checkpoint's float64 values of %s%s are rounded to float32", rounded[0], more)

    def _read_optimizer(self, reader: CheckpointReader, state: Mapping[str, Any]) -> None:
        optimizer, names = self._engine.optimizer, self._contents
        if optimizer is None:
            return
        self._require_same_optimizer(reader, state)
        for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update(
                {
                    key: value
                    for key, value in saved.items()
                    if key in group and key not in ("fused", "foreach", "capturable")
                }
            )
        known = reader.shapes
        optimizer.make_state(state["kinds"], state["scalars"], lambda kind, name: known.get(names.state(kind, name)))
        slices = [
            Slice(names.state(view.kind, view.name), view.shape, view.start, view.stop, view.tensor)
            for view in optimizer.views()
            if view.kind != "master"
        ]
        absent = sorted({part.name for part in slices} - known.keys())
        if absent:
            raise CheckpointError(
                "the checkpoint lacks optimizer state",
                where=str(reader.folder),
                got=f"none for {absent[0]}" + (f" and {len(absent) - 1} more" if len(absent) > 1 else ""),
                fix="Load with load_optimizer_states=False to start the optimizer afresh.",
            )
        reader.read_into(slices)

    def _require_same_optimizer(self, reader: CheckpointReader, state: Mapping[str, Any]) -> None:
        optimizer = self._engine.optimizer
        fix = "Load with load_optimizer_states=False to start the optimizer afresh."
        if optimizer is None:
            return
        mine, stored = optimizer.identity(), state["optimizer"]
        if stored is not None and mine["settings"] != stored["settings"]:
            raise CheckpointError(
                "the checkpoint holds the state of another optimizer",
                where=str(reader.folder),
                got=stored["class"],
                expected=mine["class"],
                fix=fix,
            )
        if len(state["groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                "the checkpoint has another number of optimizer groups",
                where=str(reader.folder),
                got=len(state["groups"]),
                expected=len(optimizer.param_groups),
                fix=fix,
            )

    def _read_own(self, reader: CheckpointReader) -> None:
        """Random generators and own buffers; they mean something only for as many ranks as wrote them."""
        engine = self._engine
        if len(reader.manifest.rank_state) != engine.mesh.world.size:
            if engine.mesh.rank == 0:
                log.info(
                    "checkpoint of %d ranks loaded on %d: random generators start from this run's seed",
                    len(reader.manifest.rank_state),
                    engine.mesh.world.size,
                )
            return
        own = decode_state(reader.manifest.rank_state[engine.mesh.rank], reader.read)
        buffers = dict(self._contents.buffers())
        for name, value in own["buffers"].items():
            if name in buffers:  # else the model has lost it since, and _read_weights has said so
                buffers[name].copy_(value)
        restore_rng(own["rng"], engine.device)


def newest_intact(directory: Path) -> Path | None:
    """The newest checkpoint of ``directory`` that verifies; None, with a warning, where there is none at all.

    Raises CheckpointError where all are damaged, or ``directory`` is a checkpoint itself: a run that starts afresh then was not meant to.
    """
    if (directory / MANIFEST_NAME).is_file():
        raise CheckpointError(
            "this is a checkpoint, not a folder of checkpoints",
            where=f"load_checkpoint({str(directory)!r})",
            fix=f"Call load_checkpoint({str(directory.parent)!r}, tag={directory.name!r}).",
        )
    faults: list[str] = []
    newest = latest_checkpoint(directory, faults.append)
    for fault in faults:
        log.warning("passed over: %s", fault)
    if newest is not None:
        return newest.folder
    if faults:
        raise CheckpointError(
            "no checkpoint is whole",
            where=str(directory),
            got=faults[-1],
            fix="Load from another folder, or move the damaged checkpoints away to start afresh.",
        )
    log.warning("there is no checkpoint in %s: nothing is loaded", directory)
    return None


def refuse_deepspeed(directory: Path, tag: str | None) -> None:
    """Raises CheckpointError where DeepSpeed has saved: a run that began afresh there was meant to go on."""
    folder = directory / (tag or "")
    if not folder.is_dir() or (folder / MANIFEST_NAME).is_file():
        return
    pattern = "*_model_states.pt" if tag is not None else "*/*_model_states.pt"
    if next(folder.glob(pattern), None) is not None and not any(directory.glob(f"*/{MANIFEST_NAME}")):
        raise CheckpointError(
            "this is a checkpoint of DeepSpeed",
            where=str(folder),
            fix=f"Make one of ours from it: zero-trial ckpt import {directory} NEW_FOLDER, and load that.",
        )


def engine_state(reader: CheckpointReader) -> dict[str, Any]:
    """What the engine wrote beside its tensors. Raises CheckpointError for a checkpoint that no engine wrote."""
    state = decode_state(reader.manifest.state, reader.read)
    keys = {
        "counters",
        "loss_scaler",
        "scheduler",
        "optimizer",
        "groups",
        "scalars",
        "kinds",
        "reduction_order",
        "client",
    }
    counters = state.get("counters") if isinstance(state, dict) and keys <= state.keys() else None
    if not isinstance(counters, dict) or not all(isinstance(counters.get(name), int) for name in COUNTERS):
        raise CheckpointError("this checkpoint was not written by an engine", where=str(reader.folder))
    return dict(state)
