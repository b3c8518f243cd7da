"""Write an engine into a checkpoint. Its logical tensors:

    param/<name>           every parameter; its master if it has one
    state/<kind>/<name>    optimizer state with one value per element (exp_avg ...), or of any shape
                           for a tensor that is updated whole
    buffer/<name>          buffers of the first rank that has them
    rank<i>/...            values that differ between ranks: random generators, buffers that differ
                           from the first rank's

No name mentions a shard. If models are parallel themselves (``mesh.model``, or a client's ``mpu``
with several data-parallel groups), ranks hold different tensors under the same names; then the
first three are below ``part<i>of<n>/``, and can only be read by the same number of parts.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_trial.checkpoint.background import BackgroundSaver
from zero_trial.checkpoint.folder import OF_TRAINER
from zero_trial.checkpoint.format import MANIFEST_NAME, Slice, dtype_name
from zero_trial.checkpoint.range_reader import read_manifest
from zero_trial.checkpoint.state_tree import capture_rng, encode_state
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.comm import AxisComm, fail_together
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.sharding.grouping import parameter_names
from zero_trial.sharding.guards.freed import is_absent
from zero_trial.sharding.optimizer_state import TensorSlice, slices_of
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Home
from zero_trial.sharding.quantized import opaque_buffers
from zero_trial.sharding.whole_tensors import opt_group_of

log = logging.getLogger("zero_trial")

_ID = uuid.uuid4().hex[:8]  # processes in two containers may have the same PID
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@contextmanager
def state_at_hand(engine: EngineAccessors, label: str) -> Iterator[None]:
    """Make masters and optimizer state readable and writable inside the block, even if they are
    offloaded.

    Collective: if a rank's disk cannot read or write them, every rank raises. Raises TrialError
    while averages replace the weights.
    """
    if engine.optimizer is not None:
        engine.optimizer.require_trained_weights(label.partition(" ")[0])
    with ExitStack() as stack:

        def lend() -> None:
            if engine.optimizer is not None:
                stack.enter_context(engine.optimizer.state_by_tensor.lent())
            stack.enter_context(engine.sharded.materialized())

        fail_together(engine.mesh.world, lend, label)
        yield
        fail_together(engine.mesh.world, stack.close, "state put away")


class CheckpointNames:
    """The current names and tensors of ``engine``: see the top of this file."""

    def __init__(self, engine: EngineAccessors) -> None:
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
        """The ranks that built the same modules."""
        mesh = self._engine.mesh
        return mesh.data if mesh.pipe.size > 1 or self.parts > 1 else mesh.world

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """List the persistent buffers, as in a state dict, and those of quantization states."""
        found = []
        for prefix, module in self._engine.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found.append((f"{prefix}.{name}" if prefix else name, buffer))
            found += opaque_buffers(module, prefix)
        return found

    def aliases(self) -> dict[str, str]:
        """Collect the tied names of the whole model, or of this part. Collective over pipe."""
        own = {alias: name for name, (_, names) in parameter_names(self._engine.module).items() for alias in names[1:]}
        stages = self._engine.mesh.pipe.gather_json(own, "tied names")
        return {alias: name for stage in stages for alias, name in stage.items()}

    def facts(self, count: int) -> dict[str, Any]:
        """Collect metadata of the whole model, or of this part of it, for other programs and
        readers. Collective over pipe.

        names_of_groups: the parameters of each of ``count`` optimizer groups, if there are several;
        dtypes: the dtype of a parameter in the model if it is not float32, because only the master
        is saved; frozen: the parameters that are not trained.
        """
        own_groups: list[list[str]] = [[] for _ in range(count)]
        for group in self._engine.sharded.groups:
            for slot in group.layout.slots if group.trainable else ():
                own_groups[opt_group_of(group.runs, slot)].append(slot.name)
        named = parameter_names(self._engine.module).items()
        dtypes = {name: dtype_name(param.dtype) for name, (param, _) in named if param.dtype != torch.float32}
        own = (own_groups, dtypes, sorted(frozen_names(self._engine)))
        groups, kinds, frozen = zip(*self._engine.mesh.pipe.gather_json(own, "facts of the model"), strict=True)
        of_groups = [sorted({name for stage in groups for name in stage[index]}) for index in range(count)]
        return ({"names_of_groups": of_groups} if count > 1 else {}) | {
            "dtypes": {name: kind for stage in kinds for name, kind in stage.items()},
            "frozen": sorted({name for stage in frozen for name in stage}),
        }


class StoredPart(NamedTuple):
    """Elements [start, stop) of a parameter or of its optimizer state, and the memory of this rank
    that holds them: a row of the table that saving and loading share.

    ``stored``: the name in a checkpoint; ``kind``: "master" for the parameter itself, otherwise the
    kind of state, such as exp_avg. The memory is only valid inside :func:`state_at_hand`.
    """

    stored: str
    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    group: ParamGroup

    def slice(self) -> Slice:
        return Slice(self.stored, self.shape, self.start, self.stop, self.tensor)


def stored_parts(engine: EngineAccessors) -> list[StoredPart]:
    """List this rank's parts of all parameters in groups, then of optimizer state."""
    names, views, parts, group_of = CheckpointNames(engine), list[TensorSlice](), [], {}
    for group in engine.sharded.groups:
        group_of.update(dict.fromkeys((slot.name for slot in group.layout.slots), group))
        views += slices_of(group, "master", group.master)
    views += engine.optimizer.state_by_tensor.views() if engine.optimizer is not None else ()
    for view in views:
        stored = names.param(view.name) if view.kind == "master" else names.state(view.kind, view.name)
        place = (view.shape, view.start, view.stop, view.tensor, group_of[view.name])
        parts.append(StoredPart(stored, view.kind, view.name, *place))
    return parts


def copied_later(engine: EngineAccessors) -> dict[tuple[str, int], ParamGroup | None]:
    """Return the parts that a background save does not copy during the call, by stored name and
    start. The value is the group before whose next update the part is copied; None for a part in a
    file, which is written during the call.

    Memory shared with a parameter is copied during the call, because ``param.data.clamp_()``
    triggers no check.
    """
    found: dict[tuple[str, int], ParamGroup | None] = {}
    for part in stored_parts(engine):
        group = part.group
        if is_absent(part.tensor if part.kind != "master" else group.master):
            shared = part.kind == "master" and group.master is group.shard and group.plan.home is Home.HOST
            in_file = not shared
        else:
            storage = group.full.untyped_storage().data_ptr()
            shared = part.kind == "master" and storage == group.master.untyped_storage().data_ptr()
            in_file = False
        if not shared:
            found[part.stored, part.start] = None if in_file else group
    return found


def folder_of(directory: Any, where: str) -> Path:
    """Return ``directory`` as a path. Raises ConfigError for None and for ""."""
    if directory is None or str(directory) == "":
        raise ConfigError(
            "the directory is an empty string",
            where=where,
            got=repr(directory),
            expected="a path",
            fix='Pass a path, e.g. "." for the working directory.',
        )
    return Path(directory)


def save_state(
    engine: EngineAccessors,
    directory: Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    *,
    without_frozen: bool = False,
    background: BackgroundSaver | None = None,
) -> None:
    """Write ``directory/tag`` (default ``global_stepN``), or let ``background`` write it.
    Collective over the world: every rank must call.

    In the middle of an accumulation, the checkpoint is of the last step, with a warning: it does
    not contain later gradients, and a resumed run trains on those micro-batches again.
    """
    if client_state is not None and not isinstance(client_state, Mapping):
        raise TrialError(
            "client_state is not a dict",
            where="engine.save_checkpoint",
            got=type(client_state).__name__,
            expected="a dict or None",
        )
    engine.sharded.moved.require_here("engine.save_checkpoint", ("optim_states", "hp_params", "lp_params"))
    # before state_at_hand, which loads files into memory
    later = copied_later(engine) if background is not None else {}
    with state_at_hand(engine, "save_checkpoint called by every rank"):
        _save(engine, directory, tag, dict(client_state or {}), without_frozen, background, later)


def _save(
    engine: EngineAccessors,
    directory: Path,
    tag: str | None,
    client_state: dict[str, Any],
    without_frozen: bool,
    background: BackgroundSaver | None,
    copied_later: Mapping[tuple[str, int], ParamGroup | None],
) -> None:
    names = CheckpointNames(engine)
    if engine.mesh.rank == 0:
        _warn_of_other_runs(engine, directory)
    if (pending := engine.pending_micro_batches()) and engine.mesh.rank == 0:
        text = "save_checkpoint after %d of %d micro-batches: the checkpoint is of step %d, without their gradients"
        log.warning(text, pending, engine.gradient_accumulation_steps(), engine.global_steps)
    engine.sharded.full_params.end_names()
    _warn_of_own_rates(engine)
    tag = _same_everywhere(engine, f"global_step{engine.global_steps}" if tag in (None, "") else str(tag))
    engine.sharded.require_same_parameters("save_checkpoint")
    state = _engine_state(engine, client_state) | {"without_frozen": without_frozen}
    whole_states, whole_slices = _whole_states(engine)
    if whole_states:
        state["whole_states"] = whole_states
    state, state_tensors = fail_together(engine.mesh.world, lambda: encode_state(state, "engine"), "engine state")
    own, own_tensors = encode_state(_own_state(engine), f"rank{engine.mesh.rank}")
    slices = [*_weights_and_state(engine, without_frozen), *whole_slices]
    slices += [Slice.whole(name, tensor) for name, tensor in own_tensors.items()]
    if engine.mesh.rank == 0:
        slices += [Slice.whole(name, tensor) for name, tensor in state_tensors.items()]
    if names.twins.index == 0:
        slices += [
            Slice.whole(names.buffer(name), buffer)
            for name, buffer in names.buffers()
            if not engine.sharded.manual_groups.is_copy(name)
        ]
    world = {
        "zero_stage": engine.config.zero_optimization.stage,
        "mesh": list(engine.mesh.shape.sizes),
        "model_parts": names.parts,
        "run": this_run(),
    }
    facts: dict[str, Any] = {"step": engine.global_steps, "state": state, "rank_state": own, "world": world}
    if background is None:
        save_checkpoint(directory, tag, slices, **facts, ranks=engine.mesh.world)
        return
    on_disk, at_call, later = list[Slice](), list[Slice](), {group: list[Slice]() for group in engine.sharded.groups}
    for part in slices:
        key = (part.name, part.start)
        group = copied_later.get(key)
        place = later[group] if group is not None else on_disk if key in copied_later else at_call
        place.append(part)
    in_order = [(group.copy_before_write, parts) for group, parts in later.items() if parts]
    background.save(directory, tag, at_call, later=in_order, on_disk=on_disk, **facts)


def this_run() -> str:
    """Return this process's name for the manifests that it writes."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_ID})"


def _warn_of_other_runs(engine: EngineAccessors, directory: Path) -> None:
    """Log who else has saved into ``directory`` since this engine was built or last saved. Only a
    warning: a preempted run may write its last checkpoint when the next run has already begun."""
    since, engine.looked_for_runs = engine.looked_for_runs, time.time()
    of_trainer = OF_TRAINER.fullmatch(directory.name)
    for folder in directory.parent.glob("checkpoint-*/*") if of_trainer else directory.glob("*"):
        with suppress(CheckpointError, OSError):  # no checkpoint, or it is being replaced
            new = (folder / MANIFEST_NAME).stat().st_mtime > since
            if new and (run := read_manifest(folder).world.get("run", this_run())) != this_run():
                log.warning(
                    "%s was saved by another run (%s) while this one (%s) trains: they replace each other's checkpoints. "
                    "End one of them, or give each its own folder",
                    *(folder, run, this_run()),
                )


def _warn_of_own_rates(engine: EngineAccessors) -> None:
    """Log a warning if learning rates differ between ranks, e.g. because each rank steps a
    scheduler with its own metric. Collective over data."""
    data, groups = engine.mesh.data, engine.optimizer.param_groups if engine.optimizer is not None else []
    # Adafactor computes its own rate if lr is None
    rates = [float(rate) for group in groups if (rate := group.get("lr")) is not None]
    everyone = data.gather_json(rates, "learning rates")
    odd = next((index for index, rates in enumerate(everyone) if rates != everyone[0]), 0)
    if odd and data.index == 0:
        log.warning(
            "step %d: the learning rates are %s on rank %d and %s on rank %d. The ranks' weights diverge at ZeRO stage 0; above it, parts of a "
            "weight train at different rates. Call the scheduler's step() with the same metric on every rank",
            *(engine.global_steps, everyone[0], data.ranks[0], everyone[odd], data.ranks[odd]),
        )


def frozen_names(engine: EngineAccessors) -> set[str]:
    """List this pipeline stage's parameters that a checkpoint without frozen ones leaves out."""
    trained = {id(param) for group in engine.sharded.groups if group.trainable for param in group.params}
    return {
        name
        for name, (param, _) in parameter_names(engine.module).items()
        if id(param) not in trained and not param.requires_grad
    }


def _weights_and_state(engine: EngineAccessors, without_frozen: bool) -> Iterator[Slice]:
    """Yield this rank's parts of parameters and of optimizer state, only on the first replica.
    State of tensors that are updated whole is in :func:`_whole_states`."""
    names, manual_groups, table = CheckpointNames(engine), engine.sharded.manual_groups, stored_parts(engine)
    if engine.mesh.coordinates["replica"] != 0:
        return
    listed = [group for group in engine.sharded.groups if group.trainable or not without_frozen]
    kept = dict.fromkeys(group for group in listed if manual_groups.owns(group))
    yield from (part.slice() for part in table if part.kind == "master" and part.group in kept)
    for group in kept:
        empty = [slot for slot in group.layout.slots if slot.numel == 0 and group.comm.index == 0]
        yield from (Slice(names.param(slot.name), slot.shape, 0, 0, group.master[:0]) for slot in empty)
    if names.twins.index == 0:
        managed = {id(param) for group in engine.sharded.groups for param in group.params}
        for name, (param, _) in parameter_names(engine.module).items():
            frozen = without_frozen and not param.requires_grad
            if id(param) not in managed and not frozen and not manual_groups.is_copy(name):
                yield Slice.whole(names.param(name), param.detach())
    whole = frozenset(engine.optimizer.state_by_tensor.whole_names if engine.optimizer is not None else ())
    state = (part for part in table if part.kind != "master" and part.name not in whole)
    yield from (part.slice() for part in state if not manual_groups.is_copy(part.name))


def _whole_states(engine: EngineAccessors) -> tuple[dict[str, Any], list[Slice]]:
    """Return the state of tensors that are updated whole: the whole model's as JSON by parameter
    name here, and this rank's tensors in it. Collective over the world.

    For tensors in lists and dicts, the kind includes their position: ``state/GG.0/<name>``. Raises
    CheckpointError for state that cannot be saved.
    """
    names, optimizer = CheckpointNames(engine), engine.optimizer

    def encode() -> tuple[dict[str, Any], list[Slice]]:
        trees: dict[str, Any] = {}
        slices: list[Slice] = []
        if optimizer is None:
            return trees, slices
        if (inner := _inner_optimizer(optimizer.base)) is not None:
            raise CheckpointError(
                "this optimizer keeps state in an optimizer nested inside it, which a checkpoint would lose",
                where=f"{type(optimizer.base).__name__}.{inner}",
                fix="Save only the weights with engine.save_16bit_model, or train with a single optimizer.",
            )
        optimizer.state_by_tensor.refuse_lost_states()
        for name, state in optimizer.state_by_tensor.whole_states():
            if engine.sharded.manual_groups.is_copy(name):
                continue
            tree, tensors = encode_state(state, f"optimizer state of {name}:")
            kinds = {place: place.partition(":/")[2].replace("/", ".") for place in tensors}
            on_device = [kinds[place] for place, tensor in tensors.items() if not tensor.is_cpu]
            # an orthogonal factor is column-major; row-major products are not bit-identical
            strides = {kinds[place]: list(each.stride()) for place, each in tensors.items() if not each.is_contiguous()}
            trees[names.param(name)] = {"state": _renamed(tree, kinds), "on_device": on_device, "strides": strides}
            slices += [Slice.whole(names.state(kinds[place], name), tensors[place].contiguous()) for place in tensors]
        return trees, slices if engine.mesh.coordinates["replica"] == 0 else []

    trees, slices = fail_together(engine.mesh.world, encode, "optimizer state of whole tensors")
    everyone = engine.mesh.world.gather_json(trees, "optimizer state of whole tensors")
    return {name: tree for own in everyone for name, tree in own.items()}, slices


def _inner_optimizer(base: torch.optim.Optimizer) -> str | None:
    """Return the attributes of ``base`` that are an optimizer, or a list of them."""
    for name, value in vars(base).items():
        inside = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(each, torch.optim.Optimizer) for each in inside):
            return name
    return None


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """Return encoded state with renamed tensors."""
    if isinstance(tree, list):
        return [_renamed(item, names) for item in tree]
    if isinstance(tree, dict):
        if set(tree) == {"$tensor"}:
            return {"$tensor": names[tree["$tensor"]]}
        return {key: _renamed(item, names) for key, item in tree.items()}
    return tree


def _engine_state(engine: EngineAccessors, client_state: dict[str, Any]) -> dict[str, Any]:
    names = CheckpointNames(engine)
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    scalars, kinds = _optimizer_facts(engine)
    ema = engine.optimizer.ema if engine.optimizer is not None else None
    return names.facts(len(groups)) | {
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "loss_scaler": engine.outcome.result.loss_scale.to_json(),
        "scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
        "optimizer": engine.optimizer.state_by_tensor.identity() if engine.optimizer is not None else None,
        "ema": {"steps": ema.steps} if ema is not None else None,
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "scalars": scalars,
        "kinds": kinds,
        "reduction_order": engine.sharded.reducer.order_by_name(),
        "aliases": names.aliases(),
        "ds_config": dict(engine.config.raw),
        "client": client_state,
    }


def _optimizer_facts(engine: EngineAccessors) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Collect scalar state by group, and the kinds of other state, from all ranks, because a rank's
    shards may contain nothing of a group. Collective."""
    optimizer = engine.optimizer
    scalars = optimizer.state_by_tensor.scalars() if optimizer is not None else {}
    kinds = sorted({part.kind for part in stored_parts(engine)} - {"master"})
    everyone = engine.mesh.world.gather_json([scalars, kinds], "optimizer state")
    all_scalars = {key: value for row, _ in everyone for key, value in row.items()}
    return all_scalars, sorted({kind for _, row in everyone for kind in row})


def _own_state(engine: EngineAccessors) -> dict[str, Any]:
    """Collect state that only this rank has: random generators, running statistics."""
    names, different = CheckpointNames(engine), {}
    for name, buffer in names.buffers():
        reference = buffer.detach().clone()
        if reference.numel():
            names.twins.broadcast(reference, f"buffer {name}")
        if not torch.equal(reference, buffer):
            different[name] = buffer
    return {"rng": capture_rng(engine.device), "buffers": different}


def _same_everywhere(engine: EngineAccessors, tag: str) -> str:
    """Return the tag under which all ranks save: rank 0's. ``checkpoint.tag_validation`` determines
    what happens if ranks passed different tags."""
    tags: list[str] = engine.mesh.world.gather_json(tag, "save_checkpoint called by every rank")
    validation = engine.config.checkpoint.tag_validation
    if len(set(tags)) > 1 and validation != "Ignore":
        fix = 'Pass the same tag on every rank, or set checkpoint.tag_validation to "Ignore" to use rank 0\'s tag.'
        fault = CheckpointError(
            "ranks passed different tags",
            where="save_checkpoint(tag)",
            got=", ".join(map(repr, tags)),
            expected="one tag",
            fix=fix,
        )
        if validation == "Fail":
            raise fault
        if engine.mesh.rank == 0:
            log.warning("%s Saved as %r.", fault, tags[0])
    return tags[0]
