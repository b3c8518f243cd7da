"""Writes an engine into a checkpoint and reads one back: which logical tensors and which numbers make up its state.

    param/<name>           every parameter; its fp32 master where there is one
    state/<kind>/<name>    optimizer state with one value per element (exp_avg ...)
    buffer/<name>          buffers of rank 0, in a pipeline of the first rank of each stage
    rank<i>/...            what differs between ranks: random generators, buffers that are not rank 0's

Nothing names a shard: the same file is read on any number of ranks and at any ZeRO stage. Random generators are put back when the number of
ranks is the same; then a resumed run has the bits of the unbroken one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from zero_trial.checkpoint import CheckpointReader, Slice, latest_checkpoint, save_checkpoint
from zero_trial.checkpoint.catalog import checkpoint_folder
from zero_trial.checkpoint.dtypes import dtype_name
from zero_trial.checkpoint.rng import capture_rng, restore_rng
from zero_trial.checkpoint.tree import decode, encode
from zero_trial.errors import CheckpointError, TrialError, ZeroTrialError
from zero_trial.mesh import AxisComm
from zero_trial.zero.facts import parameter_names

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

log = logging.getLogger("zero_trial")

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Saver:
    """Saving and loading of one engine. Every method is collective over the world: every rank must call it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(
        self, directory: Path, tag: str | None, client_state: dict[str, Any], check_latest: bool, without_frozen: bool
    ) -> bool:
        """Writes ``directory/tag``. ``check_latest`` is DeepSpeed's ``save_latest``: there is no pointer file to write, the newest
        whole checkpoint is the latest.

        Raises TrialError in the middle of an accumulation: its gradients are no part of a checkpoint.
        """
        engine = self._engine
        if engine.pending_micro_batches():
            raise TrialError(
                "a checkpoint can be saved only between optimizer steps",
                where="engine.save_checkpoint",
                got=f"micro-batch {engine.pending_micro_batches()} of {engine.gradient_accumulation_steps()}",
                fix="Save when engine.is_gradient_accumulation_boundary() was True for the step before.",
            )
        engine.sharded.wait()
        tag = tag or f"global_step{engine.global_steps}"
        tag = self._same_everywhere(tag)
        state = self._state(client_state)
        state, state_tensors = self._together(lambda: encode(state, "engine"), "engine state")
        own, own_tensors = encode(self._own_state(), f"rank{engine.mesh.rank}")
        slices = (
            list(self._weights(without_frozen))
            + list(self._moments())
            + [Slice.whole(n, t) for n, t in own_tensors.items()]
        )
        if engine.mesh.rank == 0:
            slices += [Slice.whole(name, tensor) for name, tensor in state_tensors.items()]
        if self._twins.index == 0:
            slices += [
                Slice.whole(f"buffer/{name}", buffer)
                for name, buffer in self._buffers()
                if not engine.sharded.is_copy(name)
            ]
        world = {"zero_stage": engine.zero_optimization_stage(), "mesh": list(engine.mesh.shape.sizes)}
        save_checkpoint(
            directory,
            tag,
            slices,
            step=engine.global_steps,
            state=state,
            rank_state=own,
            world=world,
            ranks=engine.mesh.world,
        )
        return True

    def save_weights(self, directory: Path, filename: str, without_frozen: bool) -> bool:
        """Writes the whole model as one safetensors file in the parameters' dtype; tied names are stored once and listed in the metadata."""
        engine = self._engine
        state = self._whole_model(engine.module_state_dict(without_frozen))
        aliases = self._aliases()
        fault = None
        if engine.mesh.rank == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                kept = {
                    name: tensor.detach().cpu().clone().contiguous()
                    for name, tensor in state.items()
                    if name not in aliases
                }
                save_file(
                    kept,
                    str(directory / filename),
                    metadata={"format": "pt", **{f"alias:{k}": v for k, v in aliases.items()}},
                )
            except OSError as error:
                fault = str(error)
        self._agree(fault, "save_16bit_model")
        return True

    def _weights(self, without_frozen: bool) -> Iterator[Slice]:
        """This rank's parts of all parameters; of replicas only the first gives them."""
        engine = self._engine
        if engine.mesh.coordinates["replica"] != 0:
            return
        managed: set[int] = set()
        for unit in engine.sharded.units:
            managed.update(id(param) for param in unit.params)
            if (without_frozen and not unit.trainable) or not engine.sharded.owns(unit):
                continue
            source = unit.master
            for piece in unit.layout.pieces(unit.comm.index):
                part = source[piece.offset : piece.offset + piece.numel]
                yield Slice(f"param/{piece.slot.name}", piece.slot.shape, piece.start, piece.stop, part)
            if unit.comm.index == 0:
                for slot in unit.layout.slots:
                    if slot.numel == 0:
                        yield Slice(f"param/{slot.name}", slot.shape, 0, 0, source[:0])
        if self._twins.index == 0:
            for name, (param, _) in parameter_names(engine.module).items():
                left_out = (without_frozen and not param.requires_grad) or engine.sharded.is_copy(name)
                if id(param) not in managed and not left_out:
                    yield Slice.whole(f"param/{name}", param.detach())

    def _moments(self) -> Iterator[Slice]:
        engine = self._engine
        if engine.optimizer is None or engine.mesh.coordinates["replica"] != 0:
            return
        for view in engine.optimizer.views():
            if view.kind != "master" and not engine.sharded.is_copy(view.name):
                yield Slice(f"state/{view.kind}/{view.name}", view.shape, view.start, view.stop, view.tensor)

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The persistent buffers: those that a state dict would hold."""
        found = []
        for prefix, module in self._engine.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found.append((f"{prefix}.{name}" if prefix else name, buffer))
        return found

    def _state(self, client_state: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        groups = engine.optimizer.param_groups if engine.optimizer is not None else []
        scalars, kinds = self._optimizer_facts()
        return {
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "loss_scaler": engine.loss_scaler.to_json(),
            "scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
            "optimizer": engine.optimizer.identity() if engine.optimizer is not None else None,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "scalars": scalars,
            "kinds": kinds,
            "reduction_order": engine.sharded.reducer.order_by_name(),
            "aliases": self._aliases(),
            "ds_config": dict(engine.config.raw),
            "client": client_state,
        }

    def _optimizer_facts(self) -> tuple[dict[str, dict[str, float]], list[str]]:
        """Scalar state by group, and the kinds of other state: from all ranks, for a rank's shards may hold nothing of a group. Collective."""
        optimizer = self._engine.optimizer
        scalars = optimizer.scalars() if optimizer is not None else {}
        kinds = sorted({view.kind for view in optimizer.views()} - {"master"}) if optimizer is not None else []
        everyone = self._engine.mesh.world.gather_json([scalars, kinds], "optimizer state")
        return {key: value for row, _ in everyone for key, value in row.items()}, sorted(
            {kind for _, row in everyone for kind in row}
        )

    def _own_state(self) -> dict[str, Any]:
        """What belongs to this rank alone: random generators, and buffers that differ from rank 0's (running statistics)."""
        engine = self._engine
        different = {}
        for name, buffer in self._buffers():
            reference = buffer.detach().clone()
            if reference.numel():
                self._twins.broadcast(reference, f"buffer {name}")
            if not torch.equal(reference, buffer):
                different[name] = buffer
        return {"rng": capture_rng(engine.device), "buffers": different}

    def _aliases(self) -> dict[str, str]:
        """Of the whole model. Collective over pipe."""
        own = {alias: name for name, (_, names) in parameter_names(self._engine.module).items() for alias in names[1:]}
        stages = self._engine.mesh.pipe.gather_json(own, "tied names")
        return {alias: name for stage in stages for alias, name in stage.items()}

    @property
    def _twins(self) -> AxisComm:
        """The ranks that have built the same modules: all, or those of one pipeline stage."""
        mesh = self._engine.mesh
        return mesh.data if mesh.pipe.size > 1 else mesh.world

    def _whole_model(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dicts of all pipeline stages together; a tied weight is the same in each. Collective over pipe."""
        pipe, whole = self._engine.mesh.pipe, dict(own)
        facts = {name: [str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in own.items()}
        for stage, theirs in enumerate(pipe.gather_json(facts, "parts of the model")):
            for name, (dtype, shape) in theirs.items():
                mine = stage == pipe.index
                value = (
                    own[name] if mine else torch.empty(shape, dtype=getattr(torch, dtype), device=self._engine.device)
                )
                pipe.broadcast(value, name, stage)
                whole[name] = value
        return whole

    # --- loading --------------------------------------------------------------------------------------------------

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
        found = self._find(directory, tag)
        if found is None:
            return None, None
        folder, verified = found
        reader = self._together(lambda: self._open(folder, verified), "open checkpoint")
        state = decode(reader.manifest.state, reader.read)
        engine.sharded.settle()
        self._together(lambda: self._read_weights(reader, strict), "read weights")
        engine.zero_grad()
        if with_optimizer and engine.optimizer is not None:
            self._together(lambda: self._read_optimizer(reader, state), "read optimizer state")
        engine.sharded.publish()
        engine.sharded.publish_frozen()
        engine.sharded.wait()
        if with_schedule and state["scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        if with_counters:
            for name in _COUNTERS:
                setattr(engine, name, state["counters"][name])
            if engine.micro_steps % engine.gradient_accumulation_steps():  # saved with another accumulation
                engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
            engine.loss_scaler = engine.loss_scaler.restored(state["loss_scaler"])
            engine.sharded.reducer.take_order(state["reduction_order"])
            self._together(lambda: self._read_own(reader), "read rank state")
        return str(folder), state["client"]

    def _find(self, directory: Path, tag: str | None) -> tuple[Path, bool] | None:
        """Where the checkpoint is, the same answer on every rank, and whether rank 0 has verified its sums already."""
        answer: dict[str, Any] = {}
        if self._engine.mesh.rank == 0:
            try:
                if tag is not None:
                    answer = {"folder": str(checkpoint_folder(directory, tag))}
                else:
                    newest = latest_checkpoint(directory, lambda line: log.warning("passed over: %s", line))
                    answer = {"folder": str(newest.folder) if newest is not None else None}
            except ZeroTrialError as fault:
                answer = {"fault": str(fault)}
        answer = self._engine.mesh.world.gather_json(answer, "find checkpoint")[0]
        if "fault" in answer:
            raise CheckpointError(answer["fault"])
        return (Path(answer["folder"]), tag is None) if answer["folder"] is not None else None

    def _open(self, folder: Path, verified: bool) -> CheckpointReader:
        reader = CheckpointReader(folder)
        if not verified:
            reader.verify(self._engine.mesh.world.index, self._engine.mesh.world.size)
        return reader

    def _read_weights(self, reader: CheckpointReader, strict: bool) -> None:
        engine = self._engine
        known = reader.shapes
        wanted: dict[str, tuple[int, ...]] = {
            f"param/{name}": tuple(param.shape) for name, (param, _) in parameter_names(engine.module).items()
        }
        buffers = dict(self._buffers())
        wanted |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in buffers.items()}
        for stage in engine.mesh.pipe.gather_json(wanted, "parts of the model"):
            wanted |= {name: tuple(shape) for name, shape in stage.items()}
        for prefix in ("param/", "buffer/"):
            mine = {name: shape for name, shape in wanted.items() if name.startswith(prefix)}
            reader.require(mine, prefix, allow_missing=not strict, allow_extra=not strict)
        slices: list[Slice] = []
        managed: set[int] = set()
        for unit in engine.sharded.units:
            managed.update(id(param) for param in unit.params)
            for piece in unit.layout.pieces(unit.comm.index):
                part = unit.master[piece.offset : piece.offset + piece.numel]
                slices.append(Slice(f"param/{piece.slot.name}", piece.slot.shape, piece.start, piece.stop, part))
        rest = {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        rest |= {
            f"param/{name}": param.data
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
        optimizer = self._engine.optimizer
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
        optimizer.make_state(state["kinds"], state["scalars"], lambda kind, name: known.get(f"state/{kind}/{name}"))
        slices = [
            Slice(f"state/{view.kind}/{view.name}", view.shape, view.start, view.stop, view.tensor)
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
        own = decode(reader.manifest.rank_state[engine.mesh.rank], reader.read)
        buffers = dict(engine.module.named_buffers())
        for name, value in own["buffers"].items():
            buffers[name].copy_(value)
        restore_rng(own["rng"], engine.device)

    # --- agreement ------------------------------------------------------------------------------------------------

    def _together(self, act: Callable[[], Any], label: str) -> Any:
        """Every rank acts; if any fails, all raise, so that none waits for the next collective."""
        fault, result = None, None
        try:
            result = act()
        except (ZeroTrialError, OSError) as error:
            fault = str(error)
        self._agree(fault, label)
        return result

    def _agree(self, fault: str | None, label: str) -> None:
        faults = [found for found in self._engine.mesh.world.gather_json(fault, label) if found is not None]
        if faults:
            raise CheckpointError(faults[0])

    def _same_everywhere(self, tag: str) -> str:
        """The tag under which all ranks save: rank 0's. ``checkpoint.tag_validation`` says what happens when another rank named another one."""
        tags: list[str] = self._engine.mesh.world.gather_json(tag, "save_checkpoint called by every rank")
        validation = self._engine.config.checkpoint.tag_validation
        if len(set(tags)) > 1 and validation != "Ignore":
            fix = 'Give every rank the same tag, or set checkpoint.tag_validation to "Ignore" to save under that of rank 0.'
            fault = CheckpointError(
                "ranks save under different tags",
                where="save_checkpoint(tag)",
                got=", ".join(map(repr, tags)),
                expected="one tag",
                fix=fix,
            )
            if validation == "Fail":
                raise fault
            if self._engine.mesh.rank == 0:
                log.warning("%s Saved as %r.", fault, tags[0])
        return tags[0]
