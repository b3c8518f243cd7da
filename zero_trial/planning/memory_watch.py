"""Rank 0's memory: planned at the first micro-batch, measured in the second step, so that a run can
compare the two.

    step 1   before the first forward: the shapes of the inputs are known, so a copy of the model
             without values runs one micro-batch
    step 2   every operation of this rank is watched, from the first forward until the optimizer has
             stepped

These are the first two steps of this process; a resumed run is measured again.

Both count bytes of live tensors at their peak. Neither changes a value or a random state of the
run. A plan does not include a loss computed outside the model: ``planning.planner.loss_in`` uses a
loss of the same size instead.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_trial.device import accelerator
from zero_trial.engine import Engine
from zero_trial.pipeline.module import PipelineModule
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.memory_plan import own_process, rank_limit, rank_processes
from zero_trial.trial.runs.events import join_memory

if TYPE_CHECKING:
    from zero_trial.planning.memory_plan import MemoryPlan

Factory = Callable[..., tuple[Any, Any, Any, Any]]


class MemoryWatch:
    """Bytes of rank 0's live tensors, planned for the first engine that ``around`` creates and
    measured in that engine's second step. If ranks compute on the CPU, their processes affect only
    whether the plan fits.

    Args:
        emit: called with one ``plan`` event, or a ``note`` with the reason why there is no plan,
            and one ``memory`` event.
        ranks_here: the number of ranks on this host, which share its memory.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], ranks_here: int = 1) -> None:
        self.plan: MemoryPlan | None = None
        self.measured: int | None = None  # bytes
        self._emit = emit
        self._ranks_here = ranks_here
        self._process = own_process()  # measured before there are tensors
        self._blueprint: Blueprint | None = None
        self._engine: Engine | None = None
        self._live: LiveBytes | None = None
        self._first_step: int | None = None  # the engine's step count when this process began to train
        self._handles: list[Any] = []

    def around(self, initialize: Factory) -> Factory:
        """Return an ``initialize`` that copies the first model, and then watches its engine."""

        def initialize_and_watch(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
            first = self._blueprint is None and self._engine is None
            if isinstance(kwargs.get("model"), PipelineModule):
                made = initialize(*args, **kwargs)
                self._give_up("use zero-trial plan for pipelines, stage by stage")
                return made
            if first and isinstance(kwargs.get("model"), nn.Module):
                self._copy(kwargs)
            made = initialize(*args, **kwargs)
            if first and isinstance(made[0], Engine):
                self._watch(made[0])
            elif isinstance(made[0], Engine):
                self._give_up("several engines; use zero-trial plan, which adds them up")
            return made

        return initialize_and_watch

    def summary(self) -> dict[str, Any]:
        """Return known bytes of live tensors, planned and measured, at the peak and between
        steps."""
        found: dict[str, Any] = {}
        if self.plan is not None:
            found["memory_planned_bytes"] = self.plan.figures.peak
            found["memory_planned_states_bytes"] = self.plan.figures.states
        measured = {}
        if self.measured is not None and self._engine is not None:
            states = sum(self._engine.persistent_bytes().values())
            measured = {"memory_measured_peak_bytes": self.measured, "memory_measured_states_bytes": states}
        return join_memory(found, [measured])

    def close(self) -> None:
        """Remove all hooks. Safe at any time."""
        self._stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _copy(self, kwargs: dict[str, Any]) -> None:
        options = {
            key: kwargs[key] for key in ("optimizer", "model_parameters", "lr_scheduler") if kwargs.get(key) is not None
        }
        device = accelerator() or "cpu"
        try:
            self._blueprint = Blueprint(kwargs["model"], options, device)
        except Exception as error:  # from the user's classes: the run continues without a plan
            self._give_up(str(error))

    def _watch(self, engine: Engine) -> None:
        self._engine = engine
        self._handles.append(engine.module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        if engine.optimizer is not None:
            self._handles.append(engine.optimizer.base.register_step_post_hook(lambda *_: self._stop()))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        engine = self._engine
        if engine is None or not torch.is_grad_enabled() or not module.training:
            return
        if self._blueprint is not None:
            blueprint, self._blueprint = self._blueprint, None
            self._make_plan(blueprint, engine, args, kwargs)
        if self._first_step is None:
            self._first_step = engine.global_steps
        if engine.global_steps == self._first_step + 1 and self._live is None and self.measured is None:
            self._start(engine, (args, kwargs))

    def _make_plan(self, blueprint: Blueprint, engine: Engine, args: Any, kwargs: Any) -> None:
        # Imported at rank 0's first micro-batch, because only then, and only rank 0, needs the
        # planner.
        from zero_trial.planning.planner import Planner, loss_in, model_subject
        from zero_trial.planning.state_bytes import TrainedModel

        model = TrainedModel(blueprint, engine.config)
        subject = model_subject(model, (args, kwargs), lambda copy, batch: loss_in(copy(*batch[0], **batch[1])))
        one_host = engine.world_size <= self._ranks_here
        limit = rank_limit(engine.device, self._ranks_here)
        on_host = engine.device.type == "cpu"
        processes = rank_processes(self._process, self._ranks_here) if on_host else 0
        try:
            with _untouched_randomness():
                planner = Planner(subject, engine.config, engine.world_size, one_host=one_host, processes=processes)
                self.plan = planner.plan()
                remedy = None if limit is None or self.plan.fits(limit) else str(planner.does_not_fit(limit))
        except Exception as error:
            self._give_up(str(error))
            return
        self._emit({"kind": "plan", "message": self.plan.line(limit), **self.plan.as_dict()})
        if remedy is not None:
            self._emit({"kind": "note", "message": remedy})

    def _start(self, engine: Engine, inputs: Any) -> None:
        live = self._live = LiveBytes(engine.device.type)
        model = engine.sharded
        live.follow(model.buffers)
        live.hold(group.master for group in model.groups)
        live.hold(buffer.shard for buffer in model.grad_buffers)
        live.hold([*engine.module.parameters(), *engine.module.buffers(), *_tensors(inputs)])
        if engine.optimizer is not None:
            live.hold(engine.optimizer.store.buffers)
            live.hold(_tensors([dict(state) for state in engine.optimizer.base.state.values()]))
        live.restart()
        live.__enter__()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.__exit__(None, None, None)
            self.measured = live.peak
            self._emit({"kind": "memory", "memory_measured_peak_bytes": live.peak})

    def _give_up(self, reason: str) -> None:
        self._blueprint = None
        if self.plan is None:
            self._emit(
                {"kind": "note", "message": f"no memory plan: {reason.splitlines()[0] if reason else 'unknown'}"}
            )


@contextmanager
def _untouched_randomness() -> Iterator[None]:
    """Restore Python's and numpy's random states; the plan restores torch's."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    other = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(other)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
