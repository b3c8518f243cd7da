"""One optimizer step, from the gradients' norm to the published parameters, and the undo of a step
that the device skipped.

    apply()     square sum of the reduced gradients, all-reduced -> norm and clip factor -> update
                -> publish
    finalize()  the outcome, known on all ranks: loss scale, counts, the name of a gradient that was
                not finite

The host decides where reading the norm costs nothing (CPU), and for optimizers that cannot read the
decision on the device. On CUDA waiting would empty the queue, so the device decides:

    step()      norm, factor and found_inf stay on the device, where the update reads them; the sum
                starts for the host; values are published. The LR scheduler and counts of steps
                advance as if the step were applied.
    backward()  of the next step finalizes: the sum arrived long ago, while the device is still busy
                with the update and the forward. A skipped step's LR scheduler, optimizer state and
                counts are undone.

Code that asks earlier (:meth:`StepOutcome.result`) waits for the norm alone, not for what is queued
behind it. A skipped step leaves the same bits in both ways. On CUDA a skipped step still all-
gathers the unchanged parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zero_trial.comm import AxisComm, Mesh
from zero_trial.comm.diagnosis import Call
from zero_trial.engine.outcome import (
    CulpritRow,
    NonFiniteStep,
    PinnedReadback,
    StepResult,
    agree_on_culprit,
    can_undo,
    find_culprit,
    local_culprits,
    step_with_undo,
    with_culprit,
)
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import Diverged, TrialError
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers import DeviceScalars
from zero_trial.sharding.layout import clip_factor, divisor
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.optimizer_view import StepStatus
from zero_trial.sharding.param_group import trace_range
from zero_trial.sharding.precision import LossScale
from zero_trial.sharding.reduce import NonFiniteGradient

log = logging.getLogger("zero_trial")

# of the read-back: what _sum_over_ranks returns, in float64; norm, factor, found_inf
_SUMS, _CONTROL = slice(0, 8), slice(8, 11)


@dataclass(frozen=True)
class _OpenStep:
    """A step that the device decides, and what the host needs once it knows the outcome."""

    step: int
    unscale: float
    model: ShardedModel
    undo: list[Callable[[], None]]
    culprits: Sequence[NonFiniteGradient]
    sums: Mapping[int, torch.Tensor]
    unused: frozenset[str]  # blocks whose forward had not run
    weighted: bool  # on this rank
    edited: torch.Tensor | None  # see ShardedModel.take_parameter_edits
    summed: Call | None  # the last sum over ranks: see CallOrder.call


class _ScaleChange(NamedTuple):
    """What a step did to the loss scale: some gradient was not finite, the scale before, and why no
    step can follow (None: one can)."""

    overflow: bool
    before: float
    error: Diverged | None


@dataclass(frozen=True)
class _Overflow:
    """A step with a gradient that is not finite, to be reported by :meth:`StepOutcome.finalize`.
    ``found``: None where it was not skipped."""

    opened: _OpenStep
    found: list[CulpritRow] | None
    change: _ScaleChange


class StepOutcome(StepStatus):
    """Applies steps, and knows the outcome of the last one. ``deferred``: the device decides, for
    optimizers that support it."""

    def __init__(self, config: ResolvedConfig, mesh: Mesh, device: torch.device, *, deferred: bool) -> None:
        self.deferred = deferred
        self._config = config
        self._wire_scale = config.sharding.wire_scale
        # of the losses since the last step, on this rank; None: they are means
        self._weight: torch.Tensor | None = None
        self._no_weight = torch.zeros(2, dtype=torch.float64, device=device)
        self._mesh = mesh
        self._other_axes = [axis for axis in (mesh.replica, mesh.model, mesh.pipe) if axis.size > 1]
        self._device = device
        self._result = StepResult(config.policy.loss_scale)
        self._readback: PinnedReadback | None = None
        self._open: _OpenStep | None = None
        self._overflow: _Overflow | None = None
        self._scheduled: int | None = None  # where the last step has left the LR scheduler
        self._warned = False  # that user code steps it, too
        self._error: TrialError | None = None  # of the last step, which the device has taken already

    # --- the outcome ------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Return whether the last step's outcome is still unknown; to ask for it is to wait."""
        return self._open is not None

    def result(self) -> StepResult:
        """Return the last step's outcome. Waits for its norm. Local: a single rank may ask."""
        if self._open is not None:
            self.settle()
        return self._result

    @property
    def loss_scale(self) -> float:
        return self.result().loss_scale.scale

    @property
    def overflow(self) -> bool:
        """Return whether the last step was skipped for a gradient that is not finite."""
        result = self.result()
        return result.norm is not None and not result.applied

    @property
    def scaler(self) -> LossScale:
        """The loss scale of the next backward pass, and how it changes."""
        return self.result().loss_scale

    def restore_scaler(self, state: Mapping[str, Any]) -> None:
        """Go on from the JSON values of a :attr:`scaler`."""
        self.restore(self.result().skipped, state)

    def gradient_multiplier(self) -> float:
        """Return the factor from a reduced shard (a sum over ranks of scaled gradients) to the
        averaged gradient, or to the sum where that was asked for. Raises TrialError while weighted
        losses wait for their step, where the sum of the weights of all ranks becomes known."""
        if self._weight is not None:
            raise TrialError(
                "the mean of weighted losses is not known before engine.step()",
                where="engine.backward(loss, weight=...)",
                got="a gradient that is asked for, changed or dropped before the step",
                fix='To clip, set "gradient_clipping" in ds_config. To drop all gradients with their weights, call engine.zero_grad().',
            )
        return self._unscale()

    def _unscale(self) -> float:
        """Return the factor from a reduced shard to the gradient, but for the sum of the weights
        where losses are weighted."""
        if self._open is not None:
            self.settle()
        divisor = self._config.divisor if self._weight is None else 1
        return 1.0 / (divisor * self._wire_scale * self._result.loss_scale.scale)

    # --- weights ----------------------------------------------------------------------------------

    @property
    def weighted(self) -> bool:
        """Return whether the losses since the last step are sums with weights."""
        return self._weight is not None

    def add_weight(self, weight: torch.Tensor) -> None:
        """Divide the gradients of the next step by ``weight`` (a scalar), added up over its losses
        and all ranks, and not by the number of ranks. All ranks give weights or none does."""
        weight = weight.detach().to(self._device, torch.float64).reshape(1)
        self._weight = weight if self._weight is None else self._weight + weight

    def drop_weight(self) -> None:
        """Forget the weights since the last step: its gradients are dropped."""
        self._weight = None

    def finalize(self) -> StepResult:
        """Return the outcome, known on all ranks; report a skipped step, and end a run that cannot
        go on. Collective over all. Raises Diverged."""
        if self._open is not None:
            self.settle()
        if self._error is not None:
            self._raise_late_error()
        if self._overflow is not None:
            overflow, self._overflow = self._overflow, None
            self.compare_calls("gradient norm")
            if overflow.found is not None and not self._alone:
                self._result.nonfinite = self._culprit(overflow.opened, overflow.found)
            self._report(overflow.change)
        return self._result

    def restore(self, skipped: int, loss_scale: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's number of skipped steps and its loss scale as JSON."""
        result = self.result()
        result.skipped, result.loss_scale = skipped, result.loss_scale.restored(loss_scale)

    def close(self) -> None:
        """Finalize without asking other ranks, which may have failed; the culprit may stay unnamed.
        Raises Diverged."""
        self.settle()
        self._raise_late_error()
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            self._report(overflow.change)

    def _raise_late_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Learn what the device has decided about the last step; undo what the host did for a
        skipped one."""
        opened, self._open = self._open, None
        if opened is None or self._readback is None:
            return
        # Here the host waits for the device, and so for ranks that its collectives need: a long
        # wait must name them.
        heartbeat = self._mesh.heartbeat
        heartbeat.waiting(f"the outcome of step {opened.step}", call=opened.summed)
        try:
            total, weighted, weight, edited = self._readback.receive()[_SUMS].view(torch.float64).tolist()
        finally:
            heartbeat.leave()
        self._error = self._refusal(opened.step, weighted, weight, own=opened.weighted)
        if self._error is not None:
            self._result.norm, self._result.applied = None, False
            for undo in opened.undo:
                undo()
            return
        if edited:
            self._error = _lost_edits(opened)
        change = self._decide(total, opened.unscale, opened.step)
        found = None
        if not self._result.applied:
            for undo in opened.undo:
                undo()
            found = local_culprits(opened.model, opened.culprits, opened.sums)
            if self._alone:
                self._result.nonfinite = self._culprit(opened, found)
            else:  # a rank that asks alone cannot ask the others
                unnamed = "a parameter that the next backward pass names"
                self._result.nonfinite = NonFiniteStep(opened.step, None, unnamed)
        if change.overflow:
            self._overflow = _Overflow(opened, found, change)

    def compare_calls(self, where: str) -> None:
        """Raise MeshError where ranks have called different collectives, which only tensors on a
        device let pass. Collective over shard."""
        if not AxisComm.on_host(torch.empty(0, device=self._device)):
            self._mesh.shard.compare_calls(where)

    # --- a step -----------------------------------------------------------------------------------

    def apply(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer,
        step: int,
        lr_scheduler: Any,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Update and publish with the reduced gradients of step number ``step``, and advance
        ``lr_scheduler``; or skip it. Collective.

        The outcome of the step before is final. Afterwards the gradients are forgotten. Raises
        Diverged.
        """
        reducer = model.reducer
        if self._scheduled is not None:
            self._notice_second_stepper(lr_scheduler, self._scheduled)
        deferred = self.deferred and optimizer.takes_device_scalars(self._device)
        model.param_grads.take_edits(at_step=True)
        edited = model.take_parameter_edits(deferred=deferred)
        reducer.reduce_missing()
        if deferred:
            if reducer.late_groups():
                reducer.reduce_late()
            with trace_range("norm"):
                sums = self._sum_over_ranks(model, [0] if edited is None else edited.sum())
            self._apply_on_device(model, optimizer, step, lr_scheduler, arguments, sums, edited)
            return
        result, unscale = self._result, self._unscale()
        with trace_range("norm"):
            # the host waits once for all numbers
            sums = self._sum_over_ranks(model, [reducer.late_groups(), model.touched()]).cpu()
            if (self._refuses(sums) | sums[3:].any()).item():  # a dry run takes conditions for False
                if (refusal := self._refusal(step, *sums[1:3].tolist(), own=self.weighted)) is not None:
                    raise refusal
                if sums[4]:
                    model.require_same_edits()
                reducer.reduce_late()
                sums = self._sum_over_ranks(model).cpu()
        if self._weight is not None:
            unscale /= sums[2].item()
        change = self._decide(sums[0].item(), unscale, step)
        if change.overflow:
            self.compare_calls("gradient norm")
        if result.applied and result.norm is not None:
            factor = 1.0 if change.overflow else clip_factor(result.norm, self._config.clip)
            update_and_publish(model, optimizer, unscale * factor)
            if lr_scheduler is not None:
                lr_scheduler.step(**arguments)
        else:
            result.nonfinite = find_culprit(model, step)
        if lr_scheduler is not None:
            self._scheduled = _position(lr_scheduler)
        self._weight = None
        model.reset_gradients()
        if change.overflow:
            self._report(change)

    def _apply_on_device(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer,
        step: int,
        lr_scheduler: Any,
        arguments: Mapping[str, Any],
        sums: torch.Tensor,
        edited: torch.Tensor | None,
    ) -> None:
        if self._readback is None:
            self._readback = PinnedReadback(self._device, _CONTROL.stop)
        unscale, reducer = self._unscale(), model.reducer
        # of the gradient times the weights of its losses, which only the device knows
        weight = sums[2:3] if self._weight is not None else None
        total = sums if weight is None else torch.cat([sums[:1] / weight.square(), sums[1:]])
        scalars = self._device_scalars(self._readback.there, total, unscale, divides=optimizer.divides)
        if weight is not None:
            by = weight.to(scalars.factor) if optimizer.divides else weight.to(scalars.factor).reciprocal()
            scalars = scalars._replace(factor=scalars.factor * by.reshape(scalars.factor.shape))
        self._readback.send()
        unused = frozenset(group.block for group in model.groups if not model.unsharder.was_used(group.block))
        undo = [optimizer.undo_step]
        found = list(reducer.nonfinite), dict(reducer.square_sums), unused
        summed = (self._other_axes or [self._mesh.shard])[-1].order.call
        opened = _OpenStep(step, unscale, model, undo, *found, self.weighted, edited, summed)
        update_and_publish(model, optimizer, 1.0, scalars)
        self._open = opened
        self._weight = None
        model.reset_gradients()
        if lr_scheduler is None:
            return
        if can_undo(lr_scheduler):
            undo.insert(0, step_with_undo(lr_scheduler, optimizer.base.param_groups, arguments))
        elif self.result().applied:
            lr_scheduler.step(**arguments)
        self._scheduled = _position(lr_scheduler)

    def _notice_second_stepper(self, lr_scheduler: Any, left_at: int) -> None:
        """Log once that user code steps the scheduler too: it advances twice per step."""
        if self._mesh.rank != 0 or _position(lr_scheduler) != left_at + 1:
            return
        if not self._warned:
            self._warned = True
            log.warning(
                "the LR scheduler was stepped since the last engine.step(), which steps it as well: leave %s.step() out, "
                "or do not give it to initialize()",
                type(lr_scheduler).__name__,
            )

    def _device_scalars(
        self, room: torch.Tensor, sums: torch.Tensor, unscale: float, *, divides: bool
    ) -> DeviceScalars:
        """Compute on the device what the update reads there; ``room`` holds what the host reads
        later.

        Args:
            sums: see :meth:`_sum_over_ranks`.
            divides: the optimizer wants a divisor.
        """
        kept, control = room[_SUMS].view(torch.float64), room[_CONTROL]
        kept.copy_(sums)
        square_sum = kept[:1]
        OPS.step_control_(square_sum, None, control, unscale, self._config.clip)
        factor = divisor(square_sum, unscale, self._config.clip) if divides else control[1:2]
        refused = self._refuses(sums).to(control)
        return DeviceScalars(factor, control[2] + refused if self._config.skip_nonfinite else refused)

    def _sum_over_ranks(self, model: ShardedModel, counts: Sequence[int] | torch.Tensor = (0,)) -> torch.Tensor:
        """Sum over all ranks, in float64, (4,) or (5,): the squares of the reduced gradient; the
        ranks whose losses have weights; the weights; ``counts`` (of late groups and of ranks that
        have edited parameters, or of groups whose edits the step overwrites).

        The first is not finite if any element on any rank is not, or if ranks have gathered or
        reduced different groups (:meth:`compare_calls` then says which). One all-reduce over each
        of shard, replica (of which each rank counts a slice), model (where copies are counted once)
        and pipe (tied weights, too). A rank without weights takes part in the same one: so all
        learn that there are both kinds.
        """
        sums = model.owned_square_sums()
        total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=self._device)
        mesh, weights = self._mesh, self._no_weight
        if self._weight is not None:  # ranks of the model axis have the same losses
            own = self._weight if mesh.model.index == 0 else torch.zeros_like(self._weight)
            weights = torch.cat([torch.ones_like(own), own])
        if isinstance(counts, torch.Tensor):
            extra = counts.to(torch.float64).reshape(1)
        elif any(counts):
            extra = torch.tensor(counts, dtype=torch.float64, device=self._device)
        else:  # without a copy from the host, for which the host would wait
            extra = weights.new_zeros(len(counts))
        values = torch.cat([total.reshape(1), weights, extra])
        mesh.shard.all_reduce_guarded(values, "gradient norm")
        for axis in self._other_axes:
            axis.all_reduce_small(values, "gradient norm")
        return values

    def _decide(self, square_sum: float, unscale: float, step: int) -> _ScaleChange:
        """Record norm and decision of step number ``step``, and set the loss scale of the next
        one."""
        result = self._result
        result.norm = math.sqrt(square_sum) * unscale if square_sum >= 0 else math.nan
        finite = math.isfinite(result.norm)
        result.applied = finite or not self._config.skip_nonfinite
        if result.applied:
            result.applied_norm = result.norm
        else:
            result.skipped += 1
            result.skipped_at.append(step)
        before = result.loss_scale.scale
        update = result.loss_scale.update(not finite)
        result.loss_scale = update.state
        if update.state.scale != before:
            log.debug("loss scale %g -> %g", before, update.state.scale)
        return _ScaleChange(not finite, before, update.error)

    def _report(self, change: _ScaleChange) -> None:
        """Log one line on rank 0 about a step that was skipped; raise on all ranks where the run
        cannot go on."""
        result = self._result
        if self._mesh.rank == 0 and result.nonfinite is not None:
            now = result.loss_scale.scale
            text = f"; loss scale {change.before:g} -> {now:g}" if change.before != now else ""
            log.warning("%s; the step is skipped on all ranks%s", result.nonfinite.describe(), text)
        if change.error is not None:
            raise with_culprit(change.error, result.nonfinite)

    def _culprit(self, opened: _OpenStep, found: Sequence[CulpritRow]) -> NonFiniteStep:
        return agree_on_culprit(opened.model, opened.step, found, lambda block: block not in opened.unused)

    def _refuses(self, sums: torch.Tensor) -> torch.Tensor:
        """Return, where ``sums`` are, whether :meth:`_refusal` refuses this step: a scalar."""
        if self._weight is None:
            return sums[1] != 0
        return ~((sums[1] == self._ranks) & (sums[2] > 0) & (sums[2] < math.inf))

    def _refusal(self, step: int, weighted: float, weight: float, *, own: bool) -> TrialError | None:
        """Return the error of all ranks for a step whose losses have weights on ``weighted`` ranks
        that are not all, or that add up to a ``weight`` by which nothing can be divided; else None.
        ``own``: this rank gives weights."""
        if 0 < weighted < self._ranks:
            return TrialError(
                "some ranks give weights to their losses, and others do not",
                where=f"engine.backward(loss, weight=...), step {step}",
                got=f"weights on {weighted:.0f} of {self._ranks} ranks; "
                f"rank {self._mesh.rank} gives {'weights' if own else 'none'}",
                expected="weights on all ranks or on none",
                fix="Give weight= on every rank; a batch without a token has the weight 0.",
            )
        if own and not 0 < weight < math.inf:
            return TrialError(
                "the weights of a step do not add up to a number above 0",
                where=f"engine.step, step {step}",
                got=weight,
                expected="a finite number above 0, e.g. the number of tokens of all micro-batches and ranks",
                fix="Leave out batches without a token, on all ranks.",
            )
        return None

    @property
    def _ranks(self) -> int:
        mesh = self._mesh
        return mesh.shard.size * mesh.replica.size * mesh.model.size * mesh.pipe.size

    @property
    def _alone(self) -> bool:
        return self._ranks == 1


def _lost_edits(opened: _OpenStep) -> TrialError:
    """Return the error of all ranks for an edit without a version that the device has overwritten
    in a step. Reads the device."""
    flags = opened.edited.tolist() if opened.edited is not None else []
    groups = [group for group, edited in zip(opened.model.rounded_groups, flags, strict=False) if edited]
    names = [slot.name for group in groups for slot in group.layout.slots]
    return TrialError(
        "values of 16-bit parameters were changed in a way that torch does not count, such as param.data.clamp_(), "
        "and the fp32 masters have overwritten them",
        where=f"engine.step, step {opened.step}",
        got=f"an edit in {' or '.join(names[:3])}{f' or {len(names) - 3} more' if len(names) > 3 else ''}"
        if names
        else "an edit on another rank, which names it",
        fix="Edit between steps under torch.no_grad() and without .data (param.clamp_()), inside "
        "zero_trial.zero.GatheredParameters(params, modifier_rank=0), or with safe_set_full_fp32_param.",
    )


def update_and_publish(
    model: ShardedModel,
    optimizer: ShardedOptimizer,
    multiplier: float,
    scalars: DeviceScalars | None = None,
) -> None:
    """Take one optimizer step with ``multiplier`` times the reduced gradients, and publish each
    parameter group as soon as it is done; return when the parameters are whole on every rank.

    ``scalars``: a factor and a skip that the device reads; a step that it skips publishes unchanged
    values. Collective over shard.
    """
    model.wait_before_writing(copies=False)
    publisher = model.publisher
    publisher.begin(optimizer.updated)
    with trace_range("update"):
        for pieces, rounded in optimizer.update(multiplier, scalars):
            publisher.updated(pieces, rounded)
    model.count_step()
    with trace_range("publish"):
        publisher.finish()
        if model.frees_parameters:
            model.unsharder.end_step()


def _position(lr_scheduler: Any) -> int | None:
    """Return how many steps ``lr_scheduler`` has taken, if it says so as torch's and ours do."""
    found = getattr(lr_scheduler, "last_epoch", getattr(lr_scheduler, "last_batch_iteration", None))
    return found if isinstance(found, int) else None
