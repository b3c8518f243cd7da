"""A gradient that is not finite, told by every rank together: which rank, which parameter, which step."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import Diverged
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers import DeviceScalars
from zero_trial.precision import LossScale
from zero_trial.sharding.norm import clip_factor, divisor
from zero_trial.sharding.reduce import NonFiniteGradient, first_nonfinite
from zero_trial.zero import ShardedModel, ShardedOptimizer

# Freed parameters read as NaN, so that a use outside their module's forward shows.
_OUTSIDE = (
    " (the forward of {block} has not run, and only while it runs are its parameters whole: call it instead of reading its weights, "
    "or raise zero_optimization.stage3_param_persistence_threshold)"
)


@dataclass(frozen=True)
class NonFiniteStep:
    """``rank`` None: only the sum over ranks is known to be bad. ``hint``: a likely cause, if one is known."""

    step: int
    rank: int | None
    parameter: str
    hint: str = ""

    def describe(self) -> str:
        who = f"on rank {self.rank}" if self.rank is not None else "in the sum over ranks"
        return f"step {self.step}: the gradient of {self.parameter} is not finite {who}{self.hint}"


def with_culprit(error: Diverged, culprit: NonFiniteStep | None) -> Diverged:
    """``error`` with the gradient that was not finite, if one is known."""
    if culprit is None:
        return error
    got = f"{error.got}, and {culprit.describe()}"
    return Diverged(error.what, where=error.where, got=got, expected=error.expected, fix=error.fix)


# How little is known, rank, number of the unit, parameter: the smallest is the answer.
Row = tuple[int, int, int, str]


def find_culprit(model: ShardedModel, step: int) -> NonFiniteStep:
    """The first culprit in rank order, the same answer on every rank. Collective over data, model and pipe; only called when there is one."""
    return agree_on_culprit(model, step, local_culprits(model, model.reducer.culprits), model.unsharder.was_used)


def local_culprits(
    model: ShardedModel, culprits: Sequence[NonFiniteGradient], sums: Mapping[int, torch.Tensor] | None = None
) -> list[Row]:
    """What this rank knows of a gradient that is not finite: whom the reduction saw, else what lies in its shards. Local; reads the device.

    ``sums``: of squares, by number of landing, for when something else may have landed in the shards since: they still tell the unit.
    """
    found: list[Row] = []
    for culprit in culprits:
        doubt = 2 if culprit.rank is None else 0 if culprit.exact else 1
        found.append((doubt, culprit.rank or 0, model.groups.index(culprit.grad_buffer.group), culprit.parameter()))
    for index, landing in enumerate([] if culprits else model.grad_buffers):
        unit, total = landing.group, (sums or {}).get(index)
        if total is not None and bool(torch.isfinite(total)):
            continue
        position = first_nonfinite(landing.shard)
        if position is not None:
            slot = unit.layout.slot_at(unit.layout.shard_range(unit.comm.index)[0] + position)
            found.append((2, 0, model.groups.index(unit), slot.name if slot is not None else unit.name))
        elif total is not None:
            found.append((3, 0, model.groups.index(unit), unit.name))
    return found


def agree_on_culprit(
    model: ShardedModel, step: int, found: Sequence[Row], was_used: Callable[[str], bool]
) -> NonFiniteStep:
    """The one culprit of what all ranks have ``found``; ``was_used(block)``: its forward had run. Collective over data, model and pipe.

    In a pipeline the last stage comes first: a bad value spreads from there towards the input.
    """
    everyone = [tuple(row) for rows in model.mesh.data.gather_json(list(found), "non-finite gradients") for row in rows]
    answer: list[Any] = []
    if everyone:
        # the unit built last comes first in the model, and a bad value spreads from there towards the input
        doubt, rank, index, parameter = min(everyone)
        block = model.groups[index].block
        answer = [doubt, rank, parameter, "" if was_used(block) else _OUTSIDE.format(block=block)]
    parts = [answer for answer in model.mesh.model.gather_json(answer, "non-finite gradients") if answer]
    answer = min(parts, default=[])
    stages = [answer for answer in model.mesh.pipe.gather_json(answer, "non-finite gradients") if answer]
    if not stages:
        return NonFiniteStep(step, None, "an unknown parameter (a row of squares overflowed fp32)")
    least = min(answer[0] for answer in stages)
    doubt, rank, parameter, hint = next(answer for answer in reversed(stages) if answer[0] == least)
    return NonFiniteStep(step, rank if doubt < 2 else None, parameter, hint)


# Brings a few numbers from where gradients are to the host, while the device goes on: they leave at once and are read later.


class PinnedReadback:
    """``there`` (n,) fp32 lives on ``device``; what it holds when :meth:`send` is called is what :meth:`receive` returns.

    On CUDA the copy goes to pinned memory in the order of the current stream, and an event marks its end. Nothing may write into ``there``
    between the two on another stream, and a second :meth:`send` overwrites the first.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        on_cuda = device.type == "cuda"
        self.there = torch.zeros(numel, device=device)
        self._here = torch.zeros(numel, pin_memory=on_cuda)
        self._arrived: Any = torch.cuda.Event() if on_cuda else None
        self.received = 0  # how often somebody has waited

    def send(self) -> None:
        """Does not wait."""
        self._here.copy_(self.there, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def receive(self) -> torch.Tensor:
        """On the host, (n,). Waits until the device has come as far as the last :meth:`send`, and no further."""
        self.received += 1
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here


# A schedule and the settings that it writes, as they were before a step that may turn out to be skipped.


def can_undo(schedule: Any) -> bool:
    """Whether ``schedule`` can be put back to an earlier state: torch's and ours can, and whatever else a checkpoint holds."""
    return hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")


def step_with_undo(
    schedule: Any, groups: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], None]:
    """Steps ``schedule``; returns what puts it and ``groups`` (an optimizer's, which it writes its values into) back to what they are now.

    What the caller has written into the groups since then stays: only values that are the step's go back.
    """
    state, before = _kept(schedule.state_dict()), _settings(groups)
    schedule.step(**arguments)
    after = _settings(groups)

    def go_back() -> None:
        schedule.load_state_dict(state)
        for group, old, new in zip(groups, before, after, strict=True):
            group.update({key: old[key] for key in old if key in group and _same(group[key], new.get(key))})

    return go_back


def _settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_kept({key: value for key, value in group.items() if key != "params"}) for group in groups]


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and value.shape == other.shape and bool((value == other).all())
    return bool(value == other)


def _kept(value: Any) -> Any:
    """A copy that later writes do not reach: of plain containers and tensors; what else a schedule may hold is kept as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _kept(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(each) for each in value)
    return value


# What becomes of a step once its gradients are there: applied or skipped, and what follows for loss scale, schedule and counts.
#
#     Verdict        the host reads the norm, then applies or skips: where reading costs nothing, or an optimizer must be told by the host
#     LateVerdict    the device applies or skips; the host hears of it later (see late_verdict)
#
# What it says is asked through :meth:`Verdict.known`.


log = logging.getLogger("zero_trial")


class StepOutcome:
    """``norm``: of the last step's averaged, unscaled gradient. ``applied``: it has changed the parameters. ``scaler``: the loss scale of the
    next backward pass."""

    def __init__(self, sharded: ShardedModel, wiring: ResolvedConfig, device: torch.device) -> None:
        self._sharded = sharded
        self._wiring = wiring
        self._device = device
        self.scaler: LossScale = wiring.policy.loss_scale
        self.norm: float | None = None
        self.applied = False
        self.skipped = 0
        self.skipped_at: deque[int] = deque(maxlen=1000)  # the last skipped steps' numbers
        self.nonfinite: NonFiniteStep | None = None

    # --- asked ----------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """The last step's outcome is not known yet; to ask for it is to wait."""
        return False

    def known(self) -> StepOutcome:
        """Itself, with everything known. Local: a single rank may ask."""
        return self

    def conclude(self) -> None:
        """Everything is known, on all ranks also who was to blame, and a run without a way out ends. Collective over all.

        Raises Diverged on every rank.
        """

    def close(self) -> None:
        """The same for an engine that ends, in which other ranks may have failed: local, so that a culprit may stay unnamed."""

    def unscale(self) -> float:
        """From a reduced shard (a sum over ranks of scaled gradients) to the averaged gradient, or to the sum where that was asked for."""
        return 1.0 / (self._wiring.divisor * self._sharded.wire_scale * self.known().scaler.scale)

    # --- a step ---------------------------------------------------------------------------------------------------

    def decide(self, step: int, schedule: Any, arguments: Mapping[str, Any]) -> None:
        """Updates, publishes and advances ``schedule`` with the reduced gradients of step number ``step``, or skips it. Collective.

        Afterwards the gradients are forgotten. Raises Diverged.
        """
        self.norm = self._norm(float(self._square_sum().item()), self.unscale())
        finite = math.isfinite(self.norm)
        self.applied = finite or not self._wiring.skip_nonfinite
        if self.applied:
            factor = clip_factor(self.norm, self._wiring.clip) if finite else 1.0
            self._update(lambda: self._sharded.update(self.unscale() * factor, defer=self._wiring.defer_publish))
            if schedule is not None:
                schedule.step(**arguments)
        else:
            self.nonfinite = find_culprit(self._sharded, step)
            self._count_skip(step)
        self._sharded.reducer.reset()
        scale, error = self._advance(not finite)
        self._tell(not finite, scale, error)

    def _square_sum(self) -> torch.Tensor:
        """Of the reduced gradient, (1,) in float64; not finite if any element on any rank is not. One scalar all-reduce over each of
        shard, replica (of which each rank counts a slice), model (where copies are counted once) and pipe (tied weights, too)."""
        sums = self._sharded.owned_square_sums()
        total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=self._device)
        total = total.reshape(1)
        mesh = self._sharded.mesh
        for axis in (mesh.shard, mesh.replica, mesh.model, mesh.pipe):
            axis.all_reduce_small(total, "gradient norm")
        return total

    def _norm(self, square_sum: float, unscale: float) -> float:
        return math.sqrt(square_sum) * unscale if square_sum >= 0 else math.nan

    def _update(self, update: Callable[[], None]) -> None:
        self._sharded.settle()
        update()
        if self._wiring.defer_publish:
            self._sharded.wait_when_called()
        else:
            self._sharded.wait()

    def _count_skip(self, step: int) -> None:
        self.skipped += 1
        self.skipped_at.append(step)

    def _advance(self, overflow: bool) -> tuple[float, Diverged | None]:
        """The loss scale of the next step; returns this one's, and why there can be no next one."""
        before = self.scaler.scale
        update = self.scaler.update(overflow)
        self.scaler = update.state
        return before, update.error

    def _tell(self, overflow: bool, before: float, error: Diverged | None) -> None:
        """One line on rank 0 about a skipped step; the end of the run on all ranks if there is no way out."""
        if overflow and self._sharded.mesh.rank == 0 and self.nonfinite is not None:
            now = self.scaler.scale
            change = f"; loss scale {before:g} -> {now:g}" if before != now else ""
            log.warning("%s; the step is skipped on all ranks%s", self.nonfinite.describe(), change)
        if error is not None:
            raise with_culprit(error, self.nonfinite)


# A step that the host does not wait in: the device applies or skips it, and the host hears of that when it must know.
#
#     step()       square sum -> all-reduce -> (norm, factor, found_inf) on the device; the sum starts for the host; the update reads factor
#                  and found_inf; values are published. Schedule and counts of steps advance as if it were applied.
#     backward()   the next one: the sum has long arrived, while the device is still busy with the update and the forward. Loss scale, counts,
#                  culprit. A skipped step's schedule and counts of steps are put back.
#
# Whoever asks earlier waits for the norm alone, not for what is queued behind it. A skipped step leaves what :class:`Verdict` leaves, to the
# bit; only its publication is sent, of the same values.


_TOTAL, _CONTROL = slice(0, 2), slice(2, 5)  # a float64 sum of squares; norm, factor, found_inf


@dataclass(frozen=True)
class _Open:
    """A step whose outcome the host does not know, and what it needs when it hears of it."""

    step: int
    unscale: float
    go_back: Sequence[Callable[[], None]]
    culprits: Sequence[NonFiniteGradient]
    sums: Mapping[int, torch.Tensor]
    unused: frozenset[str]  # blocks whose forward had not run


@dataclass(frozen=True)
class _Untold:
    """What is known of a step with a gradient that is not finite, and not told yet. ``found``: None where it was not skipped."""

    opened: _Open
    found: list[Row] | None
    scale: float
    error: Diverged | None


class DeferredStepOutcome(StepOutcome):
    """For an ``optimizer`` that takes gates. The numbers of :class:`Verdict` hold after :meth:`known`, which every reader calls."""

    def __init__(
        self, sharded: ShardedModel, wiring: ResolvedConfig, device: torch.device, optimizer: ShardedOptimizer
    ) -> None:
        super().__init__(sharded, wiring, device)
        self._optimizer = optimizer
        self.courier = PinnedReadback(device, _CONTROL.stop)
        self._open: _Open | None = None
        self._untold: _Untold | None = None
        optimizer.when_asked = self._settle

    # --- asked ----------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self._open is not None

    def known(self) -> StepOutcome:
        self._settle()
        return self

    def conclude(self) -> None:
        self._settle()
        untold, self._untold = self._untold, None
        if untold is not None:
            if untold.found is not None and not self._alone:
                self.nonfinite = self._culprit(untold.opened, untold.found)
            self._tell(True, untold.scale, untold.error)

    def close(self) -> None:
        self._settle()
        untold, self._untold = self._untold, None
        if untold is not None:
            self._tell(True, untold.scale, untold.error)

    def _settle(self) -> None:
        """Hears of the last step. Waits for its norm."""
        opened, self._open = self._open, None
        if opened is None:
            return
        total = self.courier.receive()[_TOTAL].view(torch.float64).item()
        self.norm = self._norm(float(total), opened.unscale)
        finite = math.isfinite(self.norm)
        self.applied = finite or not self._wiring.skip_nonfinite
        found = None if self.applied else self._put_back(opened)
        scale, error = self._advance(not finite)
        if not finite:
            self._untold = _Untold(opened, found, scale, error)

    def _put_back(self, opened: _Open) -> list[Row]:
        for go_back in opened.go_back:
            go_back()
        self._count_skip(opened.step)
        found = local_culprits(self._sharded, opened.culprits, opened.sums)
        if self._alone:
            self.nonfinite = self._culprit(opened, found)
        else:  # a rank that asks alone cannot ask the others
            self.nonfinite = NonFiniteStep(opened.step, None, "a parameter that the next backward pass names")
        return found

    def _culprit(self, opened: _Open, found: Sequence[Row]) -> NonFiniteStep:
        return agree_on_culprit(self._sharded, opened.step, found, lambda block: block not in opened.unused)

    @property
    def _alone(self) -> bool:
        mesh = self._sharded.mesh
        return mesh.data.size == mesh.pipe.size == mesh.model.size == 1

    # --- a step ---------------------------------------------------------------------------------------------------

    def decide(self, step: int, schedule: Any, arguments: Mapping[str, Any]) -> None:
        self.conclude()
        model, unscale = self._sharded, self.unscale()
        gate = self._gate(unscale)
        self.courier.send()
        reducer = model.reducer
        unused = {unit.block for unit in model.groups if not model.unsharder.was_used(unit.block)}
        go_back = [self._optimizer.take_back]
        opened = _Open(step, unscale, go_back, list(reducer.culprits), dict(reducer.square_sums), frozenset(unused))
        self._update(lambda: model.update(1.0, gate, defer=self._wiring.defer_publish))
        self._open = opened
        reducer.reset()
        if schedule is None:
            return
        if not self._wiring.skip_nonfinite:
            schedule.step(**arguments)
        elif can_undo(schedule):
            go_back.insert(0, step_with_undo(schedule, self._optimizer.base.param_groups, arguments))
        elif self.known().applied:
            schedule.step(**arguments)

    def _gate(self, unscale: float) -> DeviceScalars:
        """Of the reduced gradients, on the device; what the host is to hear of them is in the courier's room."""
        room, clip = self.courier.there, self._wiring.clip
        total, control = room[_TOTAL].view(torch.float64), room[_CONTROL]
        total.copy_(self._square_sum())
        OPS.step_control_(total, None, control, unscale, clip)
        factor = divisor(total, unscale, clip) if self._optimizer.divides else control[1:2]
        return DeviceScalars(factor, control[2] if self._wiring.skip_nonfinite else None)


def choose_step_outcome(
    sharded: ShardedModel, wiring: ResolvedConfig, device: torch.device, optimizer: ShardedOptimizer | None
) -> StepOutcome:
    """Late on CUDA, where waiting would empty the queue, for optimizers that the device can tell what to do."""
    if device.type == "cuda" and optimizer is not None and optimizer.takes_gates(device):
        return DeferredStepOutcome(sharded, wiring, device, optimizer)
    return StepOutcome(sharded, wiring, device)
