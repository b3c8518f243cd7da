"""One optimizer step, from the gradients' norm to the published parameters, and the record of its
outcome.

    square sum of the reduced gradients, all-reduced -> norm and clip factor -> update -> publish

The host reads one small tensor per step: the sums over all ranks from which
:meth:`StepOutcome.apply` decides to apply, skip, or refuse the step. After ``apply`` the outcome is
final on every rank.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zero_trial.comm import Mesh
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import Diverged, TrialError
from zero_trial.sharding.layout import clip_factor
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import trace_range
from zero_trial.sharding.precision import LossScale, StepStatus
from zero_trial.sharding.reduce import first_nonfinite

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class NonFiniteStep:
    """A non-finite gradient. ``rank`` is None if only the sum is known to be non-finite."""

    step: int
    rank: int | None
    parameter: str

    def describe(self) -> str:
        who = f"on rank {self.rank}" if self.rank is not None else "in the sum over ranks"
        return f"step {self.step}: the gradient of {self.parameter} is not finite {who}"


@dataclass
class StepResult:
    """The last step's outcome, and counts over all steps."""

    loss_scale: LossScale  # of the next backward pass
    norm: float | None = None  # of the averaged, unscaled gradient before clipping
    applied: bool = False  # whether the step changed the parameters
    applied_norm: float | None = None  # of the last step that changed the parameters
    skipped: int = 0
    # numbers of the last skipped steps
    skipped_at: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    nonfinite: NonFiniteStep | None = None


# --- the non-finite gradient: what each rank knows, and the gradient that all ranks report


def with_culprit(error: Diverged, culprit: NonFiniteStep | None) -> Diverged:
    """Return ``error`` with the non-finite gradient, if it is known."""
    if culprit is None:
        return error
    got = f"{error.got}, and {culprit.describe()}"
    return Diverged(error.what, where=error.where, got=got, expected=error.expected, fix=error.fix)


def find_culprit(model: ShardedModel, step: int) -> NonFiniteStep:
    """Return the first rank with a non-finite gradient, the same on every rank. Collective over
    data, model and pipe; only called after a non-finite norm.

    The last pipeline stage counts as first, and within a stage the group built last: backward
    spreads a bad value from there toward the input.
    """
    mesh = model.mesh
    rows = _local_culprits(model)
    for axis in (mesh.data, mesh.model):
        found = axis.gather_json(rows, "non-finite gradients")
        rows = sorted(tuple(row) for each in found for row in each)[:1]
    stages = mesh.pipe.gather_json(rows, "non-finite gradients")
    known = [row for each in reversed(stages) for row in each]
    if not known:
        return NonFiniteStep(step, None, "an unknown parameter (a row of squares overflowed fp32)")
    in_doubt, rank, _, parameter = min(known, key=lambda row: row[0])
    return NonFiniteStep(step, None if in_doubt else rank, parameter)


def _local_culprits(model: ShardedModel) -> list[tuple[bool, int, int, str]]:
    """Return what this rank knows, either from the reductions or from its shards. Local; syncs with
    the device.

    A row is (whether the rank is uncertain, rank, index of the group, parameter).
    """
    buffers = model.reducer.grad_buffers
    number = {id(group): index for index, group in enumerate(model.groups)}
    found = [
        (False, rank, number[id(buffers[index].group)], name) for index, (rank, name) in model.reducer.nonfinite.items()
    ]
    for buffer in [] if found else buffers:
        group = buffer.group
        position = first_nonfinite(buffer.shard)
        if position is not None:
            slot = group.layout.slot_at(group.layout.shard_range(group.comm.index)[0] + position)
            name = slot.name if slot is not None else group.name
            found.append((model.mesh.data.size > 1, model.mesh.rank, number[id(group)], name))
    return found


class _ScaleChange(NamedTuple):
    """How a step changed the loss scale, and the error if no further step is possible."""

    overflow: bool
    before: float
    error: Diverged | None


class StepOutcome(StepStatus):
    """Applies steps. ``result`` is the outcome of the last one."""

    def __init__(self, config: ResolvedConfig, mesh: Mesh, device: torch.device) -> None:
        self.result = StepResult(config.policy.loss_scale)
        self._config = config
        # sum of the weights of the losses since the last step, on this rank; None: unweighted means
        self._weight: torch.Tensor | None = None
        self._mesh = mesh
        self._other_axes = [axis for axis in (mesh.replica, mesh.model, mesh.pipe) if axis.size > 1]
        self._device = device

    # --- the outcome ------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Return whether the last step was skipped because of a non-finite gradient."""
        return self.result.norm is not None and not self.result.applied

    @property
    def scaler(self) -> LossScale:
        """The loss scale of the next backward pass, with its update rule."""
        return self.result.loss_scale

    def restore_scaler(self, state: Mapping[str, Any]) -> None:
        """Restore a :attr:`scaler` from its JSON values."""
        self.restore(self.result.skipped, state)

    def restore(self, skipped: int, loss_scale: Mapping[str, Any]) -> None:
        """Restore a checkpoint's number of skipped steps and its loss scale (JSON)."""
        self.result.skipped, self.result.loss_scale = skipped, self.result.loss_scale.restored(loss_scale)

    def gradient_multiplier(self) -> float:
        """Return the factor from a reduced shard (a sum over ranks of scaled gradients) to the
        averaged gradient, or to the summed gradient if ds_config says so. Raises TrialError after
        weighted losses: only the step learns the sum of the weights of all ranks."""
        if self._weight is not None:
            raise TrialError(
                "the mean of weighted losses is unknown before engine.step()",
                where="engine.backward(loss, weight=...)",
                got="an access to a gradient before the step",
                fix='To clip, set "gradient_clipping" in ds_config. To drop all gradients with their weights, call engine.zero_grad().',
            )
        return self._unscale(self._config.divisor)

    def _unscale(self, divisor: float) -> float:
        """Return the factor from a reduced shard to the gradient divided by ``divisor``."""
        return 1.0 / (divisor * self._config.sharding.wire_scale * self.loss_scale)

    # --- weights ----------------------------------------------------------------------------------

    @property
    def weighted(self) -> bool:
        """Return whether the losses since the last step are sums with weights."""
        return self._weight is not None

    def add_weight(self, weight: torch.Tensor) -> None:
        """Divide the gradients of the next step by the sum of ``weight`` (a scalar) over its losses
        and all ranks, instead of by the number of ranks. All ranks must pass weights, or none."""
        weight = weight.detach().to(self._device, torch.float64).reshape(1)
        self._weight = weight if self._weight is None else self._weight + weight

    def drop_weight(self) -> None:
        """Forget the weights since the last step: its gradients are dropped."""
        self._weight = None

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
        ``lr_scheduler``; or skip the step. Then drop the gradients. Collective over all ranks;
        raises Diverged.

        The order matters:

            1. Edits by user code are applied first: a gradient that was set is reduced, an edited
               parameter is copied to its master before the update overwrites the parameter.
            2. Every gradient is reduced before the norm is computed. Gradients that arrive after
               their group's reduction on any rank (late gradients) need a second sum and norm.
            3. All ranks decide from the same sums, so all of them apply, skip or refuse the step.
               If it is refused, nothing has changed yet.
            4. Shards are written only after every peer has read the values of the previous step.
            5. A group is published as soon as its part is updated, while the next group is updated;
               the step ends when all parameters are complete again.
        """
        reducer, result = model.reducer, self.result
        model.param_grads.take_edits(at_step=True)
        own_edits = model.take_parameter_edits()
        reducer.reduce_missing()
        with trace_range("norm"):
            total, weighted, weight, late, edited = self._sum_over_ranks(model, reducer.late_groups(), own_edits)
            if weighted or self._weight is not None:
                self._require_weights(step, weighted, weight)
            if edited:
                model.require_same_parameters("engine.step")
            if late:
                reducer.reduce_late()
                total, *_ = self._sum_over_ranks(model)
        unscale = self._unscale(self._config.divisor) if self._weight is None else self._unscale(1) / weight
        norm = math.sqrt(total) * unscale if total >= 0 else math.nan
        change = self._decide(norm, step)
        if change.overflow:
            self.compare_calls("gradient norm")
        if result.applied:
            factor = 1.0 if change.overflow else clip_factor(norm, self._config.clip)
            model.wait_before_writing(copies=False)
            with trace_range("update"):
                updates = optimizer.update(unscale * factor)
                model.unsharder.publish(model.groups, optimizer.updated, updates)
            model.end_step()
            if lr_scheduler is not None:
                lr_scheduler.step(**arguments)
        else:
            result.nonfinite = find_culprit(model, step)
        self._weight = None
        model.reset_gradients()
        if change.overflow:
            self._report(change)

    def compare_calls(self, where: str) -> None:
        """Raise MeshError if ranks have called different collectives. On devices, unlike on
        CPUs, the calls themselves do not detect this. Collective over shard."""
        if self._device.type != "cpu":
            self._mesh.shard.compare_calls(where)

    def _sum_over_ranks(self, model: ShardedModel, late: int = 0, edited: bool = False) -> list[float]:
        """Return five sums over all ranks, in float64, on the host: the squares of the reduced
        gradient; the ranks whose losses have weights; the weights; the ``late`` groups; the ranks
        with ``edited`` parameters.

        The first is not finite if any element on any rank is not, or if ranks have gathered or
        reduced different groups (:meth:`compare_calls` then names them). One all-reduce over each
        of shard, replica (each rank counts a slice), model (copies count once) and pipe (tied
        weights count once, too). Ranks with and without weights use the same all-reduce, so that
        all of them detect a mix.
        """
        mesh, squares = self._mesh, model.owned_square_sums()
        values = torch.zeros(5, dtype=torch.float64, device=self._device)
        if squares:
            values[0] = torch.stack(squares).sum()
        if self._weight is not None:
            values[1] = 1
            if mesh.model.index == 0:  # ranks of the model axis have the same losses
                values[2:3] = self._weight
        if late or edited:
            values[3:] = torch.tensor([late, edited], dtype=torch.float64)
        mesh.shard.all_reduce_guarded(values, "gradient norm")
        for axis in self._other_axes:
            axis.all_reduce_small(values, "gradient norm")
        if values.is_cpu:
            return values.tolist()
        # The host now waits for the device, and thus for the ranks in its collectives: the
        # heartbeat must name them if the wait is long.
        mesh.heartbeat.enter("gradient norm", call=(self._other_axes or [mesh.shard])[-1].order.call, again=True)
        try:
            return values.tolist()
        finally:
            mesh.heartbeat.leave()

    def _decide(self, norm: float, step: int) -> _ScaleChange:
        """Record ``norm`` and the decision on step ``step``, and set the next loss scale."""
        result, finite = self.result, math.isfinite(norm)
        result.norm = norm
        result.applied = finite or not self._config.skip_nonfinite
        if result.applied:
            result.applied_norm = norm
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
        """Log one line on rank 0 about a skipped step; raise on all ranks if training must stop."""
        result = self.result
        if self._mesh.rank == 0 and result.nonfinite is not None:
            now = result.loss_scale.scale
            text = f"; loss scale {change.before:g} -> {now:g}" if change.before != now else ""
            log.warning("%s; the step is skipped on all ranks%s", result.nonfinite.describe(), text)
        if change.error is not None:
            raise with_culprit(change.error, result.nonfinite)

    def _require_weights(self, step: int, weighted: float, weight: float) -> None:
        """Raise TrialError, on all ranks, if the losses of this step have weights on only some
        ranks (``weighted``), or if the sum of the weights, ``weight``, is not a valid divisor."""
        if 0 < weighted < self._ranks:
            raise TrialError(
                "some ranks pass weight= with their losses, and others do not",
                where=f"engine.backward(loss, weight=...), step {step}",
                got=f"weights on {weighted:.0f} of {self._ranks} ranks; rank {self._mesh.rank} passes {'weights' if self.weighted else 'none'}",
                expected="weights on all ranks or on none",
                fix="Pass weight= on every rank; a batch without tokens has weight 0.",
            )
        if self.weighted and not 0 < weight < math.inf:
            raise TrialError(
                "the weights of a step must add up to a finite number above 0",
                where=f"engine.step, step {step}",
                got=weight,
                expected="e.g. the number of tokens of all micro-batches and ranks",
                fix="Skip batches without tokens, on all ranks.",
            )

    @property
    def _ranks(self) -> int:
        mesh = self._mesh
        return mesh.shard.size * mesh.replica.size * mesh.model.size * mesh.pipe.size
