"""Writes an engine into a checkpoint: see :mod:`zero_trial.engine.loading` for what is in it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError

from zero_trial.checkpoint import Slice, save_checkpoint
from zero_trial.checkpoint.export import write_weights
from zero_trial.checkpoint.state_tree import capture_rng, encode_state
from zero_trial.comm.failures import fail_together, raise_together
from zero_trial.engine.loading import COUNTERS, CheckpointNames, StateLoader
from zero_trial.errors import CheckpointError, TrialError
from zero_trial.sharding.grouping import parameter_names

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

log = logging.getLogger("zero_trial")

P = ParamSpec("P")
T = TypeVar("T")


def _with_state_at_hand(method: Callable[Concatenate[StateSaver, P], T]) -> Callable[Concatenate[StateSaver, P], T]:
    """Masters and optimizer state can be read and written while ``method`` runs, wherever they live.

    Collective: a rank whose disk does not give them, or does not take them back, ends ``method`` on every rank.
    """

    @functools.wraps(method)
    def run(saver: StateSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine = saver._engine
        with ExitStack() as stack:

            def lend() -> None:
                if engine.optimizer is not None:
                    stack.enter_context(engine.optimizer.lent())
                stack.enter_context(engine.sharded.lent())

            fail_together(engine.mesh.world, lend, f"{method.__name__}_checkpoint called by every rank")
            result = method(saver, *args, **kwargs)
            fail_together(engine.mesh.world, stack.close, "state put away")
        return result

    return run


class StateSaver:
    """Saving and loading of one engine. Every method is collective over the world: every rank must call it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _contents(self) -> CheckpointNames:
        return CheckpointNames(self._engine)

    @_with_state_at_hand
    def load(
        self,
        directory: Path,
        tag: str | None,
        strict: bool,
        with_optimizer: bool,
        with_schedule: bool,
        with_counters: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See :meth:`Loader.load`."""
        return StateLoader(self._engine).load(directory, tag, strict, with_optimizer, with_schedule, with_counters)

    @_with_state_at_hand
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
        tag = self._same_everywhere(f"global_step{engine.global_steps}" if tag in (None, "") else str(tag))
        state = self._state(client_state) | {"without_frozen": without_frozen}
        state, state_tensors = fail_together(engine.mesh.world, lambda: encode_state(state, "engine"), "engine state")
        own, own_tensors = encode_state(self._own_state(), f"rank{engine.mesh.rank}")
        slices = (
            list(self._weights(without_frozen))
            + list(self._moments())
            + [Slice.whole(n, t) for n, t in own_tensors.items()]
        )
        if engine.mesh.rank == 0:
            slices += [Slice.whole(name, tensor) for name, tensor in state_tensors.items()]
        if self._contents.twins.index == 0:
            slices += [
                Slice.whole(self._contents.buffer(name), buffer)
                for name, buffer in self._contents.buffers()
                if not engine.sharded.manual_groups.is_copy(name)
            ]
        world = {
            "zero_stage": engine.zero_optimization_stage(),
            "mesh": list(engine.mesh.shape.sizes),
            "model_parts": self._contents.parts,
        }
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
        if self._contents.parts > 1:
            raise TrialError(
                "no rank has the whole model: it is parallel itself",
                where="engine.save_16bit_model",
                got=f"{self._contents.parts} parts",
                fix="Use engine.save_checkpoint, or join the parts of engine.module_state_dict() as the model cuts them.",
            )
        state = self._whole_model(engine.module_state_dict(without_frozen))
        aliases = self._contents.aliases()
        fault = None
        if engine.mesh.rank == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                kept = {
                    name: tensor.detach().cpu().clone().contiguous()
                    for name, tensor in state.items()
                    if name not in aliases
                }
                metadata = {"format": "pt", **{f"alias:{alias}": name for alias, name in aliases.items()}}
                write_weights(directory / filename, kept, metadata)
            except (OSError, SafetensorError) as error:
                fault = f"save_16bit_model: {directory / filename} was not written: {error}"
        raise_together(engine.mesh.world, fault, "save_16bit_model")
        return True

    def _weights(self, without_frozen: bool) -> Iterator[Slice]:
        """This rank's parts of all parameters; of replicas only the first gives them."""
        engine, names = self._engine, self._contents
        if engine.mesh.coordinates["replica"] != 0:
            return
        managed: set[int] = set()
        for unit in engine.sharded.groups:
            managed.update(id(param) for param in unit.params)
            if (without_frozen and not unit.trainable) or not engine.sharded.manual_groups.owns(unit):
                continue
            source = unit.master
            for piece in unit.layout.pieces(unit.comm.index):
                part = source[piece.offset : piece.offset + piece.numel]
                yield Slice(names.param(piece.slot.name), piece.slot.shape, piece.start, piece.stop, part)
            if unit.comm.index == 0:
                for slot in unit.layout.slots:
                    if slot.numel == 0:
                        yield Slice(names.param(slot.name), slot.shape, 0, 0, source[:0])
        if self._contents.twins.index == 0:
            for name, (param, _) in parameter_names(engine.module).items():
                left_out = (without_frozen and not param.requires_grad) or engine.sharded.manual_groups.is_copy(name)
                if id(param) not in managed and not left_out:
                    yield Slice.whole(names.param(name), param.detach())

    def _moments(self) -> Iterator[Slice]:
        engine, names = self._engine, self._contents
        if engine.optimizer is None or engine.mesh.coordinates["replica"] != 0:
            return
        for view in engine.optimizer.views():
            if view.kind != "master" and not engine.sharded.manual_groups.is_copy(view.name):
                yield Slice(names.state(view.kind, view.name), view.shape, view.start, view.stop, view.tensor)

    def _state(self, client_state: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        groups = engine.optimizer.param_groups if engine.optimizer is not None else []
        scalars, kinds = self._optimizer_facts()
        return {
            "counters": {name: getattr(engine, name) for name in COUNTERS},
            "loss_scaler": engine.loss_scaler.to_json(),
            "scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
            "optimizer": engine.optimizer.identity() if engine.optimizer is not None else None,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "scalars": scalars,
            "kinds": kinds,
            "reduction_order": engine.sharded.reducer.order_by_name(),
            "aliases": self._contents.aliases(),
            "dtypes": self._contents.dtypes(),
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
        for name, buffer in self._contents.buffers():
            reference = buffer.detach().clone()
            if reference.numel():
                self._contents.twins.broadcast(reference, f"buffer {name}")
            if not torch.equal(reference, buffer):
                different[name] = buffer
        return {"rng": capture_rng(engine.device), "buffers": different}

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
