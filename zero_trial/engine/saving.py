"""Write an engine into a checkpoint. Its logical tensors:

    param/<name>           every parameter; its master where there is one
    state/<kind>/<name>    optimizer state with one value per element (exp_avg ...), or of any shape
                           for a tensor that is updated whole
    buffer/<name>          buffers of the first rank that has them
    rank<i>/...            what differs between ranks: random generators, buffers that are not the
                           first rank's

No name mentions a shard. Where models are parallel themselves (``mesh.model``, or a client's
``mpu`` with several data-parallel groups) ranks hold other tensors under the same names; then the
first three are below ``part<i>of<n>/``, and are read only by as many parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint import BackgroundSaver, Slice, save_checkpoint
from zero_trial.checkpoint.folder import OF_TRAINER, may_delete_all
from zero_trial.checkpoint.format import dtype_name
from zero_trial.checkpoint.state_tree import capture_rng, encode_state
from zero_trial.comm import AxisComm, Mesh, fail_together
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.sharding.grouping import parameter_names
from zero_trial.sharding.guards.freed import is_absent
from zero_trial.sharding.optimizer_state import StateView
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Home
from zero_trial.sharding.whole_tensors import opt_group_of

log = logging.getLogger("zero_trial")

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@contextmanager
def state_at_hand(engine: EngineAccessors, label: str) -> Iterator[None]:
    """Make masters and optimizer state readable and writable inside the block, wherever they live.

    Collective: a rank whose disk does not give them, or does not take them back, ends the block on
    every rank. Raises TrialError while averages replace the weights.
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
    """The names and tensors of ``engine`` as they are now: see the top of this file."""

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
        """The ranks that have built the same modules: all, or those of one pipeline stage and one
        part of a parallel model."""
        mesh = self._engine.mesh
        return mesh.data if mesh.pipe.size > 1 or self.parts > 1 else mesh.world

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """List the persistent buffers: those that a state dict would hold."""
        found = []
        for prefix, module in self._engine.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found.append((f"{prefix}.{name}" if prefix else name, buffer))
        return found

    def aliases(self) -> dict[str, str]:
        """Collect the tied names of the whole model, or of this part of it. Collective over
        pipe."""
        own = {alias: name for name, (_, names) in parameter_names(self._engine.module).items() for alias in names[1:]}
        stages = self._engine.mesh.pipe.gather_json(own, "tied names")
        return {alias: name for stage in stages for alias, name in stage.items()}

    def of_groups(self, count: int) -> list[list[str]]:
        """Collect the parameters of each of ``count`` optimizer groups. Collective over pipe."""
        own: list[list[str]] = [[] for _ in range(count)]
        for group in self._engine.sharded.groups:
            for slot in group.layout.slots if group.trainable else ():
                own[opt_group_of(group, slot)].append(slot.name)
        stages = self._engine.mesh.pipe.gather_json(own, "names of optimizer groups")
        return [sorted({name for stage in stages for name in stage[index]}) for index in range(count)]

    def dtypes(self) -> dict[str, str]:
        """Collect the dtype in which the model computes with a parameter, where it is not float32:
        masters do not tell. Collective over pipe."""
        named = parameter_names(self._engine.module).items()
        own = {name: dtype_name(param.dtype) for name, (param, _) in named if param.dtype != torch.float32}
        return {
            name: kind for stage in self._engine.mesh.pipe.gather_json(own, "dtypes") for name, kind in stage.items()
        }

    def frozen(self) -> list[str]:
        """List the parameters of the whole model that are not trained. Collective over pipe."""
        stages = self._engine.mesh.pipe.gather_json(sorted(frozen_names(self._engine)), "frozen parameters")
        return sorted({name for stage in stages for name in stage})


def folder_of(directory: Any, where: str) -> Path:
    """Return ``directory`` as a path. Raises ConfigError for None and for "", which would be the
    working directory."""
    if directory is None or str(directory) == "":
        raise ConfigError(
            "there is no directory",
            where=where,
            got=repr(directory),
            expected="a path",
            fix='Give one, "." for the working directory.',
        )
    return Path(directory)


def trainer_may_delete(mesh: Mesh, background: BackgroundSaver, directory: Path, saved: Path | None) -> bool:
    """Return whether ``directory`` is named as Hugging Face's Trainer names a checkpoint's, and the
    Trainer may delete all others after this save, while the new one is still being written. A save
    that is under way is waited for: the Trainer may delete what is complete by then. Collective
    over the world. ``saved``: see :func:`may_delete_all`."""
    if not OF_TRAINER.fullmatch(directory.name):
        return False
    background.wait_before_next()
    may = mesh.rank == 0 and may_delete_all(directory, saved)
    return bool(mesh.world.gather_json(may, "checkpoints of a Trainer")[0])


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

    In the middle of an accumulation the checkpoint is that of the last step, with a warning: the
    gradients since are no part of it, and a resumed run sees those micro-batches again.
    """
    if client_state is not None and not isinstance(client_state, Mapping):
        raise TrialError(
            "client_state is not a dict",
            where="engine.save_checkpoint",
            got=type(client_state).__name__,
            expected="a dict or None",
        )
    on_disk, later = (_on_disk(engine), _copied_later(engine)) if background is not None else (frozenset(), {})
    with state_at_hand(engine, "save_checkpoint called by every rank"):
        _save(engine, directory, tag, dict(client_state or {}), without_frozen, background, on_disk, later)


def _on_disk(engine: EngineAccessors) -> frozenset[tuple[str, int]]:
    """Name the stored pieces, with their first elements, whose values are in a file between
    steps."""
    names, found = CheckpointNames(engine), set()
    for group in engine.sharded.groups:
        if _in_file(group):
            pieces = group.layout.pieces(group.comm.index)
            found |= {(names.param(piece.slot.name), piece.start) for piece in pieces}
    for view in _moment_views(engine):
        if is_absent(view.tensor):
            found.add((names.state(view.kind, view.name), view.start))
    return frozenset(found)


def _copied_later(engine: EngineAccessors) -> dict[tuple[str, int], ParamGroup]:
    """Name the stored pieces, with their first elements, that only updates write to, and calls that
    wait for copies as these do; and the group of each. Not what shares memory with a parameter:
    ``param.data.clamp_()`` triggers no check."""
    names = CheckpointNames(engine)
    found: dict[tuple[str, int], ParamGroup] = {}
    for group in engine.sharded.groups:
        shared = group.full.untyped_storage().data_ptr() == group.master.untyped_storage().data_ptr()
        if not shared and not is_absent(group.master):
            pieces = group.layout.pieces(group.comm.index)
            found |= {(names.param(piece.slot.name), piece.start): group for piece in pieces}
    group_of = {slot.name: group for group in engine.sharded.groups for slot in group.layout.slots}
    for view in _moment_views(engine):
        if not is_absent(view.tensor):
            found[names.state(view.kind, view.name), view.start] = group_of[view.name]
    return found


def _in_file(group: ParamGroup) -> bool:
    """Return whether the group's values are in a file between steps: not in the host's memory."""
    own = group.master is group.shard
    return is_absent(group.master) and not (own and group.plan.home is Home.HOST)


def snapshot_bytes(engine: EngineAccessors) -> int:
    """Count the bytes that this rank copies for a checkpoint that training does not wait for:
    parameters and state that live in memory; local. Between steps."""
    swapped = _on_disk(engine)
    names, total = CheckpointNames(engine), 0
    if engine.mesh.coordinates["replica"] != 0:
        return 0
    for group in engine.sharded.groups:
        if not _in_file(group) and engine.sharded.manual_groups.owns(group):
            numel = sum(piece.numel for piece in group.layout.pieces(group.comm.index))
            total += numel * group.master.element_size()
    for view in _moment_views(engine):
        if (names.state(view.kind, view.name), view.start) not in swapped:
            total += view.tensor.numel() * view.tensor.element_size()
    return total


def _save(
    engine: EngineAccessors,
    directory: Path,
    tag: str | None,
    client_state: dict[str, Any],
    without_frozen: bool,
    background: BackgroundSaver | None,
    on_disk: frozenset[tuple[str, int]],
    later: Mapping[tuple[str, int], ParamGroup],
) -> None:
    names = CheckpointNames(engine)
    if (pending := engine.pending_micro_batches()) and engine.mesh.rank == 0:
        text = (
            "save_checkpoint after %d of %d micro-batches: the checkpoint is that of step %d, without their gradients"
        )
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
    slices = [*_weights(engine, without_frozen), *_moments(engine), *whole_slices]
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
        "zero_stage": engine.zero_optimization_stage(),
        "mesh": list(engine.mesh.shape.sizes),
        "model_parts": names.parts,
    }
    facts: dict[str, Any] = {"step": engine.global_steps, "state": state, "rank_state": own, "world": world}
    if background is None:
        save_checkpoint(directory, tag, slices, **facts, ranks=engine.mesh.world)
        return
    streamed = [part for part in slices if (part.name, part.start) in on_disk]
    copied = [part for part in slices if (part.name, part.start) not in (on_disk | later.keys())]
    parts: dict[ParamGroup, list[Slice]] = {}
    for part in slices:
        if (group := later.get((part.name, part.start))) is not None:
            parts.setdefault(group, []).append(part)
    in_order = [(group, parts[group]) for group in engine.sharded.groups if group in parts]
    background.save(directory, tag, copied, later=in_order, on_disk=streamed, **facts)


def _warn_of_own_rates(engine: EngineAccessors) -> None:
    """Log a warning where ranks have learning rates of their own, as a scheduler gives them that
    each rank steps with its own metric. Collective over data."""
    data, groups = engine.mesh.data, engine.optimizer.param_groups if engine.optimizer is not None else []
    # Adafactor finds its own where it has None
    rates = [float(rate) for group in groups if (rate := group.get("lr")) is not None]
    everyone = data.gather_json(rates, "learning rates")
    odd = next((index for index, rates in enumerate(everyone) if rates != everyone[0]), 0)
    if odd and data.index == 0:
        log.warning(
            "step %d: the learning rates are %s on rank %d and %s on rank %d, so that their weights drift apart at ZeRO stage 0, and "
            "parts of a weight have different rates above. Step a scheduler with the same metric on every rank",
            *(engine.global_steps, everyone[0], data.ranks[0], everyone[odd], data.ranks[odd]),
        )


def frozen_names(engine: EngineAccessors) -> set[str]:
    """Name the parameters of this pipeline stage that a checkpoint without frozen parameters leaves
    out."""
    trained = {id(param) for group in engine.sharded.groups if group.trainable for param in group.params}
    return {
        name
        for name, (param, _) in parameter_names(engine.module).items()
        if id(param) not in trained and not param.requires_grad
    }


def _weights(engine: EngineAccessors, without_frozen: bool) -> Iterator[Slice]:
    """Yield this rank's parts of all parameters; of replicas only the first gives them."""
    names = CheckpointNames(engine)
    if engine.mesh.coordinates["replica"] != 0:
        return
    managed: set[int] = set()
    for group in engine.sharded.groups:
        managed.update(id(param) for param in group.params)
        if (without_frozen and not group.trainable) or not engine.sharded.manual_groups.owns(group):
            continue
        source = group.master
        for piece in group.layout.pieces(group.comm.index):
            part = source[piece.offset : piece.offset + piece.numel]
            yield Slice(names.param(piece.slot.name), piece.slot.shape, piece.start, piece.stop, part)
        if group.comm.index == 0:
            for slot in group.layout.slots:
                if slot.numel == 0:
                    yield Slice(names.param(slot.name), slot.shape, 0, 0, source[:0])
    if names.twins.index == 0:
        for name, (param, _) in parameter_names(engine.module).items():
            left_out = (without_frozen and not param.requires_grad) or engine.sharded.manual_groups.is_copy(name)
            if id(param) not in managed and not left_out:
                yield Slice.whole(names.param(name), param.detach())


def _moment_views(engine: EngineAccessors) -> list[StateView]:
    """List this rank's pieces of optimizer state without the masters, which are stored as
    parameters."""
    views = engine.optimizer.state_by_tensor.views() if engine.optimizer is not None else ()
    return [view for view in views if view.kind != "master"]


def _moments(engine: EngineAccessors) -> Iterator[Slice]:
    names = CheckpointNames(engine)
    if engine.optimizer is None or engine.mesh.coordinates["replica"] != 0:
        return
    whole = frozenset(engine.optimizer.state_by_tensor.whole_names)  # in _whole_states
    for view in _moment_views(engine):
        if view.name not in whole and not engine.sharded.manual_groups.is_copy(view.name):
            yield Slice(names.state(view.kind, view.name), view.shape, view.start, view.stop, view.tensor)


def _whole_states(engine: EngineAccessors) -> tuple[dict[str, Any], list[Slice]]:
    """Return the state of tensors that are updated whole: of the whole model as JSON by the
    parameter's name here, and this rank's tensors in it. Collective over the world.

    Tensors in lists and dicts have their place in the kind: ``state/GG.0/<name>``. Raises
    CheckpointError for state that cannot be saved.
    """
    names, optimizer = CheckpointNames(engine), engine.optimizer

    def encode() -> tuple[dict[str, Any], list[Slice]]:
        if optimizer is not None and (inner := _inner_optimizer(optimizer.base)) is not None:
            raise CheckpointError(
                "this optimizer keeps state in another one inside it, which a checkpoint would lose",
                where=f"{type(optimizer.base).__name__}.{inner}",
                fix="Save the weights alone with engine.save_16bit_model, or train with one optimizer.",
            )
        if optimizer is not None:
            optimizer.state_by_tensor.refuse_lost_states()
        trees: dict[str, Any] = {}
        slices: list[Slice] = []
        for name, state in optimizer.state_by_tensor.whole_states() if optimizer is not None else ():
            if engine.sharded.manual_groups.is_copy(name):
                continue
            tree, tensors = encode_state(state, f"optimizer state of {name}:")
            kinds = {place: place.partition(":/")[2].replace("/", ".") for place in tensors}
            on_device = [kinds[place] for place, tensor in tensors.items() if not tensor.is_cpu]
            # an orthogonal factor lies by columns; a product with it has other bits by rows
            strides = {kinds[place]: list(each.stride()) for place, each in tensors.items() if not each.is_contiguous()}
            trees[names.param(name)] = {"state": _renamed(tree, kinds), "on_device": on_device, "strides": strides}
            slices += [Slice.whole(names.state(kinds[place], name), tensors[place].contiguous()) for place in tensors]
        return trees, slices if engine.mesh.coordinates["replica"] == 0 else []

    trees, slices = fail_together(engine.mesh.world, encode, "optimizer state of whole tensors")
    everyone = engine.mesh.world.gather_json(trees, "optimizer state of whole tensors")
    return {name: tree for own in everyone for name, tree in own.items()}, slices


def _inner_optimizer(base: torch.optim.Optimizer) -> str | None:
    """Return the attribute of ``base`` that is an optimizer, or a list of them."""
    for name, value in vars(base).items():
        inside = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(each, torch.optim.Optimizer) for each in inside):
            return name
    return None


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """Return encoded state whose tensors have other names."""
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
    # only other programs need it: a checkpoint of one group stays as it was
    of_groups = {"names_of_groups": names.of_groups(len(groups))} if len(groups) > 1 else {}
    return of_groups | {
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
        "dtypes": names.dtypes(),
        "frozen": names.frozen(),
        "ds_config": dict(engine.config.raw),
        "client": client_state,
    }


def _optimizer_facts(engine: EngineAccessors) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Collect scalar state by group, and the kinds of other state: from all ranks, for a rank's
    shards may hold nothing of a group. Collective."""
    optimizer = engine.optimizer
    scalars = optimizer.state_by_tensor.scalars() if optimizer is not None else {}
    kinds = sorted({view.kind for view in _moment_views(engine)})
    everyone = engine.mesh.world.gather_json([scalars, kinds], "optimizer state")
    all_scalars = {key: value for row, _ in everyone for key, value in row.items()}
    return all_scalars, sorted({kind for _, row in everyone for kind in row})


def _own_state(engine: EngineAccessors) -> dict[str, Any]:
    """Collect what belongs to this rank alone: random generators, and buffers that differ from rank
    0's (running statistics)."""
    names, different = CheckpointNames(engine), {}
    for name, buffer in names.buffers():
        reference = buffer.detach().clone()
        if reference.numel():
            names.twins.broadcast(reference, f"buffer {name}")
        if not torch.equal(reference, buffer):
            different[name] = buffer
    return {"rng": capture_rng(engine.device), "buffers": different}


def _same_everywhere(engine: EngineAccessors, tag: str) -> str:
    """Return the tag under which all ranks save: rank 0's. ``checkpoint.tag_validation`` decides
    about ranks that gave another one."""
    tags: list[str] = engine.mesh.world.gather_json(tag, "save_checkpoint called by every rank")
    validation = engine.config.checkpoint.tag_validation
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
        if engine.mesh.rank == 0:
            log.warning("%s Saved as %r.", fault, tags[0])
    return tags[0]
