"""What is known of a step once it is over: norm, loss scale and counts, the numbers that come from
the device, and which gradient was not finite; how a skipped step's LR scheduler goes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from zero_trial.device import is_accelerator, torch_module
from zero_trial.errors import Diverged
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.precision import LossScale
from zero_trial.sharding.reduce import NonFiniteGradient, first_nonfinite

# Freed parameters read as NaN where torch does not ask FreedParameter (C++ extensions).
_OUTSIDE = (
    " (the forward of {block} has not run, and only while it runs are its parameters whole: call it instead of reading its weights, "
    "or raise zero_optimization.stage3_param_persistence_threshold)"
)


@dataclass(frozen=True)
class NonFiniteStep:
    """A gradient that was not finite. ``rank`` None: only the sum over ranks is known to be bad.
    ``hint``: a likely cause, if one is known."""

    step: int
    rank: int | None
    parameter: str
    hint: str = ""

    def describe(self) -> str:
        who = f"on rank {self.rank}" if self.rank is not None else "in the sum over ranks"
        return f"step {self.step}: the gradient of {self.parameter} is not finite {who}{self.hint}"


@dataclass
class StepResult:
    """The last step's outcome, and counts over all steps."""

    loss_scale: LossScale  # of the next backward pass
    norm: float | None = None  # of the averaged, unscaled gradient before clipping
    applied: bool = False  # the parameters have changed
    applied_norm: float | None = None  # of the last step that changed them
    skipped: int = 0
    # numbers of the last skipped steps
    skipped_at: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    nonfinite: NonFiniteStep | None = None


class PinnedReadback:
    """Brings a few numbers to the host while the device goes on: they are sent at once and read
    later.

    ``there`` (n,) fp32 lives on ``device``; what it holds when :meth:`send` is called is what
    :meth:`receive` returns.

    On an accelerator the copy goes to pinned memory in the order of the current stream, and an
    event marks its end. Nothing may write into ``there`` between the two on another stream, and a
    second :meth:`send` overwrites the first.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        away = is_accelerator(device)
        self.there = torch.zeros(numel, device=device)
        self._here = torch.zeros(numel, pin_memory=away)
        self._arrived: Any = torch_module(device).Event() if away else None
        self.received = 0  # number of waits

    def send(self) -> None:
        """Start the copy. Does not wait."""
        self._here.copy_(self.there, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def receive(self) -> torch.Tensor:
        """Return the values on the host, (n,). Waits until the device has reached the last
        :meth:`send`, and no further."""
        self.received += 1
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here


# --- the gradient that was not finite: what each rank knows, and the one that all name


def with_culprit(error: Diverged, culprit: NonFiniteStep | None) -> Diverged:
    """Return ``error`` with the gradient that was not finite, if one is known."""
    if culprit is None:
        return error
    got = f"{error.got}, and {culprit.describe()}"
    return Diverged(error.what, where=error.where, got=got, expected=error.expected, fix=error.fix)


# Degree of doubt, rank, number of the parameter group, parameter: the smallest is the answer.
CulpritRow = tuple[int, int, int, str]


def find_culprit(model: ShardedModel, step: int) -> NonFiniteStep:
    """Name the first culprit in rank order, the same on every rank. Collective over data, model and
    pipe; only called when there is one."""
    return agree_on_culprit(model, step, local_culprits(model, model.reducer.nonfinite), model.unsharder.was_used)


def local_culprits(
    model: ShardedModel, culprits: Sequence[NonFiniteGradient], sums: Mapping[int, torch.Tensor] | None = None
) -> list[CulpritRow]:
    """Find what this rank knows of a gradient that is not finite: what the reduction saw, else what
    its shards hold. Local; reads the device.

    ``sums``: of squares, by number of gradient buffer, for when other gradients may have come into
        the shards since: they still tell the group.
    """
    found: list[CulpritRow] = []
    for culprit in culprits:
        doubt = 2 if culprit.rank is None else 0 if culprit.exact else 1
        found.append((doubt, culprit.rank or 0, model.groups.index(culprit.grad_buffer.group), culprit.parameter()))
    for index, buffer in enumerate([] if culprits else model.grad_buffers):
        group, total = buffer.group, (sums or {}).get(index)
        if total is not None and bool(torch.isfinite(total)):
            continue
        position = first_nonfinite(buffer.shard)
        if position is not None:
            slot = group.layout.slot_at(group.layout.shard_range(group.comm.index)[0] + position)
            found.append((2, 0, model.groups.index(group), slot.name if slot is not None else group.name))
        elif total is not None:
            found.append((3, 0, model.groups.index(group), group.name))
    return found


def agree_on_culprit(
    model: ShardedModel, step: int, found: Sequence[CulpritRow], was_used: Callable[[str], bool]
) -> NonFiniteStep:
    """Choose one culprit from what all ranks have ``found``; ``was_used(block)``: its forward had
    run. Collective over data, model and pipe.

    In a pipeline the last stage comes first: a bad value spreads from there towards the input.
    """
    everyone = [tuple(row) for rows in model.mesh.data.gather_json(list(found), "non-finite gradients") for row in rows]
    answer: list[Any] = []
    if everyone:
        # the group built last comes first in the model, and a bad value spreads from there towards
        # the input
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


# --- undo of a learning rate scheduler ------------------------------------------------------------


def can_undo(lr_scheduler: Any) -> bool:
    """Return whether ``lr_scheduler`` can go back to an earlier state: torch's and ours can, and
    every other one that a checkpoint can hold."""
    return hasattr(lr_scheduler, "state_dict") and hasattr(lr_scheduler, "load_state_dict")


def step_with_undo(
    lr_scheduler: Any, groups: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], None]:
    """Step ``lr_scheduler``; return the function that restores it and ``groups`` (the optimizer's,
    which it writes into) as they are now.

    What the caller has written into the groups since then stays: only values that the step wrote go
    back.
    """
    state, before = _copy(lr_scheduler.state_dict()), _settings(groups)
    lr_scheduler.step(**arguments)
    after = _settings(groups)

    def undo() -> None:
        lr_scheduler.load_state_dict(state)
        for group, old, new in zip(groups, before, after, strict=True):
            group.update({key: old[key] for key in old if key in group and _same(group[key], new.get(key))})

    return undo


def _settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_copy({key: value for key, value in group.items() if key != "params"}) for group in groups]


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and value.shape == other.shape and bool((value == other).all())
    return bool(value == other)


def _copy(value: Any) -> Any:
    """Copy plain containers and tensors, so that later writes do not reach the copy; other values
    are kept as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(each) for each in value)
    return value
