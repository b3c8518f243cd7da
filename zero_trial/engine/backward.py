"""Backward passes of an engine's model, however they start, and which parameters they reach.

    engine.backward(loss)           scale, begin, autograd, end
    engine.scale(loss).backward()   the first gradient begins the pass, an autograd callback ends it
    loss.backward()                 the same; gradients are divided by the accumulation on arrival
    other.backward(loss)            another engine's pass: gradients are added, reduced at the step

Gradients that bypass the engine's forward (e.g. a weight penalty) and arrive after the last pass of
a step are added, too. This may happen on a single rank.

All of these compute the same update. engine.backward() scales the loss. For all other passes the
engine scales each gradient when it arrives at its parameter, not when the pass enters the model, so
that gradients from every graph path (a penalty on weights, a method of the module other than
forward) get the same factor. The hook on the engine's outputs only notes the pass, before autograd
adds anything; ``torch.autograd.grad`` triggers it without any effect.

An fp16 loss must be scaled before autograd runs, because an underflowed gradient cannot be
recovered. ``loss.backward()`` is therefore refused if there is a loss scale.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.observe import BACKWARD, REDUCE_WAIT, Observer
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.engine.start_checks import reported
from zero_trial.engine.step import StepOutcome
from zero_trial.errors import TrialError
from zero_trial.pipeline.executor import loss_error
from zero_trial.sharding.guards.grad_access import ShownBefore
from zero_trial.sharding.layout import wide_dtype
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.unshard import tensors_in
from zero_trial.util.failures import add_note

log = logging.getLogger("zero_trial")

_WITH_GRADIENTS = "Compute the loss with gradients enabled, from a parameter that requires grad."
_FREED = (
    "Weights are freed between the forward of their block and the backward pass of what it returns (ZeRO stage 3, "
    "offload_param). A loss term that needs them, such as a penalty that a forward hook adds to a list, must be returned "
    "by the block's forward or set as an attribute of its module."
)


@dataclass(frozen=True)
class _ScaledPass:
    """A pass whose loss an engine has scaled. ``own``: inside that engine's backward()."""

    scale: float
    own: bool


# By autograd's id of the pass. Autograd is global to the process, so one pass can involve two
# engines. Autograd never reuses an id.
_SCALED: dict[int, _ScaledPass] = {}


@dataclass(eq=False)
class _NotedPass:
    """A running pass. ``own``: started by :meth:`BackwardPasses.run`, not by torch; ``foreign``:
    inside another engine's backward(); ``after_last``: after the last pass of the step; ``begun``:
    it counts as a pass of this engine; ``reached``: a gradient has arrived at a parameter;
    ``shown``: what ``param.grad`` showed before the first gradient arrived."""

    number: int
    foreign: bool = False
    scaled: bool = True
    factor: float = 1.0  # for gradients when they arrive
    after_last: bool = False
    own: bool = False
    begun: bool = False
    reached: bool = False
    shown: Sequence[ShownBefore] = ()


class BackwardPasses:
    """Begins, scales and ends the backward passes of one engine, which it references weakly."""

    def __init__(
        self, engine: EngineAccessors, outcome: StepOutcome, resolved: ResolvedConfig, observer: Observer
    ) -> None:
        self._engine = weakref.ref(engine)
        self._outcome = outcome
        self._observer = observer
        self.pending = 0  # passes since the last step
        self.total = 0  # passes of the run, except dropped ones
        self.hints = True  # hint at missing steps: until a step, no_sync(), coalesced() or a hint
        self.syncs = True  # whether backward passes reduce their gradients, if the plan does so
        self.cut_off = False  # whether an exception ended a coalesced() block in this step
        self._noted: _NotedPass | None = None
        self._division_logged = False
        self._hook = functools.partial(_note, weakref.ref(self))
        engine.sharded.on_foreign_gradient(self._gradient_came)

    # --- engine.backward --------------------------------------------------------------------------

    def run(
        self, loss: torch.Tensor, *, retain_graph: bool, divide: bool, weight: float | torch.Tensor | None
    ) -> torch.Tensor:
        """See :meth:`Engine.backward`; ``divide``: by the accumulation."""
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise loss_error(loss, "engine.backward", _WITH_GRADIENTS)
        engine = self._trained()
        self._check_weights(engine, weighted=weight is not None)
        steps = engine._batch.accumulation if divide and weight is None else 1
        if steps != 1:
            self._log_division(engine, steps)
        if weight is None:
            mean = loss.detach() if steps == 1 else loss.detach() / steps
        else:
            weight = torch.as_tensor(weight, dtype=torch.float64)
            mean = loss.detach() / weight.to(loss.device, torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
        factor = self._outcome.loss_scale / steps
        if self._observer.events is not None:
            self._observer.events.saw_loss(engine, loss if weight is None else mean)
        if self._noted is not None:
            self.forget_pass()
        last = engine.is_gradient_accumulation_boundary()
        root = loss if factor == 1.0 else loss.to(wide_dtype(loss.dtype, torch.float32)) * factor
        self._noted = own = _NotedPass(0, own=True)
        number: list[int] = []
        mark = root.register_hook(functools.partial(_mark, number, _ScaledPass(factor * steps, own=True)))
        try:
            with self._observer.phase(BACKWARD, engine):
                self._begin(engine, own, last)
                root.backward(retain_graph=retain_graph)
            self._end(engine, last)
        except BaseException as error:
            engine.sharded.unsharder.drop_pass()
            if engine.sharded.plan.params is not Lifetime.ALWAYS and "modified by an inplace" in str(error):
                add_note(error, _FREED)
            raise
        finally:
            self._noted = None
            mark.remove()
            for passed in number:
                _SCALED.pop(passed, None)
        if weight is not None:
            self._outcome.add_weight(weight)
        return mean

    def _check_weights(self, engine: EngineAccessors, *, weighted: bool) -> None:
        """Raise TrialError if a step mixes passes with and without weights, or inside
        ``ema_weights()``."""
        if engine.optimizer is not None and engine.optimizer.ema is not None:
            engine.optimizer.ema.require_trained_weights("backward")
        before = self._outcome.weighted
        if before and weighted:
            engine.sharded.param_grads.require_kept()
        if before is not weighted and (before or _has_gradients(engine)):
            raise TrialError(
                "some losses of a step have weight=, and others do not",
                where="backward",
                expected="weight= for every loss of a step, or for none",
            )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """See :meth:`Engine.scale`."""
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
            raise loss_error(loss, "engine.scale", _WITH_GRADIENTS)
        scale, engine = self._outcome.loss_scale, self._trained()
        self._log_division(engine, engine.gradient_accumulation_steps())
        factor = scale / engine.gradient_accumulation_steps()
        scaled = loss.to(wide_dtype(loss.dtype, torch.float32)) * factor
        scaled.register_hook(functools.partial(_mark_until_end, _ScaledPass(scale, own=False)))
        return scaled

    # --- loss.backward ----------------------------------------------------------------------------

    def watch(self, output: Any) -> None:
        """Note the passes that enter the model through its ``output``."""
        for tensor in (output,) if output.__class__ is torch.Tensor else tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._hook)

    def note(self, *, by_output: bool) -> _NotedPass:
        """Prepare for the gradients of the running pass, and return the pass. ``by_output``: the
        pass has reached an output of the engine."""
        number, noted = torch._C._current_graph_task_id(), self._noted
        if noted is not None and (noted.own or noted.number == number):
            noted.after_last = noted.after_last and not by_output
            return noted
        engine, scaled = self._trained(), _SCALED.get(number)
        factor = self._outcome.loss_scale / scaled.scale if scaled else 1.0 / engine.gradient_accumulation_steps()
        foreign = scaled is not None and scaled.own
        is_scaled = scaled is not None or self._outcome.loss_scale == 1.0
        after_last = not by_output and engine.sharded.param_grads.complete
        self._noted = noted = _NotedPass(number, foreign, is_scaled, factor, after_last)
        noted.shown = engine.sharded.param_grads.rescale(factor)
        if not foreign:
            engine.sharded.unsharder.last_micro_batch = engine.is_gradient_accumulation_boundary()
        _at_end(functools.partial(_end, weakref.ref(self), noted))
        return noted

    def _gradient_came(self, added: bool) -> None:
        """Begin the pass at its first gradient. ``added``: it was already added to earlier ones."""
        noted, first = self._noted, self._noted is None
        if noted is None:
            noted = self.note(by_output=False)
        if noted.begun:
            return
        noted.reached = True
        if torch.is_grad_enabled():
            raise TrialError(
                "gradients that have a graph of their own (create_graph=True) cannot be accumulated in param.grad",
                where="loss.backward(create_graph=True)",
                fix="Use torch.autograd.grad(loss, ..., create_graph=True), and call engine.backward with the loss computed from its result.",
            )
        if first and added and noted.factor != 1.0:
            raise TrialError(
                "a gradient was added to earlier ones before the engine could scale it",
                where="loss.backward()",
                got="a backward pass that bypasses the engine's forward",
                fix="Call engine.backward(loss), or the engine itself (engine(x), not engine.module(x)).",
            )
        self._check_weights(self._trained(), weighted=False)
        if noted.foreign:
            return
        if not noted.scaled:
            raise TrialError(
                "Loss scaling is required: without it small fp16 gradients are lost",
                where="loss.backward()",
                got="a backward pass without the loss scale",
                expected=f"a loss multiplied by {self._outcome.loss_scale:g}",
                fix="Call engine.backward(loss), or engine.scale(loss).backward().",
            )
        if noted.after_last:
            return
        noted.shown = ()  # will not be shown again
        engine = self._trained()
        if noted.number not in _SCALED:
            self._log_division(engine, engine.gradient_accumulation_steps())
        self._observer.begin(BACKWARD, engine)
        self._begin(engine, noted, engine.is_gradient_accumulation_boundary())

    def end(self, noted: _NotedPass) -> None:
        """End a pass that :meth:`note` has noted."""
        if self._noted is not noted:
            return
        self._noted = None
        engine = self._trained()
        if not noted.begun:
            grads = engine.sharded.param_grads
            grads.rescale(1.0)
            if not noted.reached:  # torch.autograd.grad
                grads.show_again(noted.shown)
            else:
                grads.show_foreign(noted.shown, alone=engine.mesh.data.size == 1)
            return
        self._observer.end(BACKWARD, engine)
        self._end(engine, engine.is_gradient_accumulation_boundary())

    # --- both -------------------------------------------------------------------------------------

    def _begin(self, engine: EngineAccessors, noted: _NotedPass, last: bool) -> None:
        """Begin a pass of this engine whose loss is scaled; ``last``: a step follows. Every pass
        begins here, before its first gradient is accepted."""
        noted.begun = True
        if last and engine.optimizer is not None:
            engine.optimizer.store.prefetch()
        reduce = self.syncs and (last or engine.sharded.plan.reduces_every_micro_batch)
        engine.sharded.begin_backward(reduce=reduce, last=last)

    def _end(self, engine: EngineAccessors, last: bool) -> None:
        """Wait for the reductions of a pass that has begun, and count the pass."""
        with self._observer.phase(REDUCE_WAIT, engine):
            engine.sharded.end_backward(show=last)
        self.pending += 1
        self.total += 1

    def _log_division(self, engine: EngineAccessors, steps: int) -> None:
        """Log once that the engine divides by ``steps``; it cannot detect a user's own division."""
        if steps == 1 or self._division_logged:
            return
        self._division_logged = True
        if engine.mesh.rank == 0 and not engine.global_steps:
            log.info(
                "the engine divides each loss by %d (gradient_accumulation_steps): if your loop divides it too, gradients are %d times too "
                "small. In that case remove your division, or call engine.backward(loss, scale_wrt_gas=False)",
                *(steps, steps),
            )

    def require_gradients(self) -> None:
        """Raise TrialError if no gradient has arrived since the last step. A ``param.grad`` that
        user code has set is treated like a gradient from autograd (in fp16: times the loss scale).

        Decides without communication: the other ranks may still be inside a reduction of this
        step's backward pass.
        """
        engine = self._trained()
        if not self.pending and not self.any and not sum(buf.queue_set() for buf in engine.sharded.grad_buffers):
            error = TrialError(
                "step() found no gradients",
                where="engine.step",
                got=f"no backward pass since step {engine.global_steps}",
                fix="Call engine.backward(loss) on every rank before step(), or skip this step().",
            )
            raise reported(engine, error)

    @property
    def any(self) -> bool:
        """Return whether gradients of any loss have arrived since the last step."""
        return bool(self.pending) or _has_gradients(self._trained())

    def forget_pass(self) -> None:
        """Forget a pass that ended with an exception."""
        self._noted = None
        self._trained().sharded.param_grads.rescale(1.0)

    def forget(self) -> None:
        """Reset the counts after a step, or after the gradients were dropped."""
        if self._noted is not None:
            self.forget_pass()
        self.pending = 0
        self.cut_off = False

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Reduce nothing inside the block. It cannot be nested or contain a step."""
        self.require_outside(
            "engine.no_sync", "no_sync context manager reentry is unsupported, also inside coalesce_grad_reduction()"
        )
        self.syncs = self.hints = False
        try:
            yield
        finally:
            self.syncs = True

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Reduce the gradients of all passes of the block at its end, or together with those of
        later micro-batches if the plan reduces once per step."""
        self.require_outside(
            "engine.coalesce_grad_reduction", "coalesce_grad_reduction() cannot be nested in itself or in no_sync()"
        )
        self.syncs, self.cut_off, self.hints = False, True, False
        try:
            yield
            self.cut_off = False
        finally:
            self.syncs = True
        engine = self._trained()  # skipped after an exception: other ranks may not get here
        if self.pending and (
            engine.is_gradient_accumulation_boundary() or engine.sharded.plan.reduces_every_micro_batch
        ):
            engine.sharded.param_grads.take_edits(at_step=True)
            engine.sharded.reducer.reduce_missing()

    def require_outside(self, where: str, refusal: str) -> None:
        """Raise TrialError, with ``refusal``, inside a block that reduces nothing."""
        if not self.syncs:
            raise TrialError(refusal, where=where, fix="End the block first: its gradients are reduced at its end.")

    def require_whole_blocks(self) -> None:
        """Raise TrialError for a step inside a block that reduces nothing, or after an exception
        ended a :meth:`coalesced` block: the gradients are incomplete and not reduced."""
        self.require_outside(
            "engine.step",
            "It is illegal to call Engine.step() inside no_sync context manager or coalesce_grad_reduction()",
        )
        if self.cut_off:
            raise TrialError(
                "an exception ended coalesce_grad_reduction(), so gradients of this step are missing",
                where="engine.step",
                fix="Call engine.zero_grad(), and repeat the micro-batches of this step.",
            )

    def _trained(self) -> EngineAccessors:
        engine = self._engine()
        if engine is None:
            raise TrialError(
                "the engine of this model no longer exists, but its hooks are still on the model",
                where="backward",
                fix="Call the engine's destroy() before another engine, or plain torch, trains the model; or build the model again.",
            )
        return engine


def _has_gradients(engine: EngineAccessors) -> bool:
    return any(buffer.has_gradients or buffer.shard_filled for buffer in engine.sharded.grad_buffers)


# Python's garbage collector cannot see hooks and callbacks inside autograd, so they reference the
# passes weakly.


def _note(passes: weakref.ref[BackwardPasses], grad: torch.Tensor) -> None:
    found = passes()
    if found is not None:
        found.note(by_output=True)


def _end(passes: weakref.ref[BackwardPasses], noted: _NotedPass) -> None:
    found = passes()
    if found is not None:
        found.end(noted)


def _mark(number: list[int], scaled: _ScaledPass, grad: torch.Tensor) -> None:
    number.append(torch._C._current_graph_task_id())
    _SCALED[number[-1]] = scaled


def _mark_until_end(scaled: _ScaledPass, grad: torch.Tensor) -> None:
    number = torch._C._current_graph_task_id()
    _SCALED[number] = scaled
    _at_end(lambda: _SCALED.pop(number, None))


def _at_end(call: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
