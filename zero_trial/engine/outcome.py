"""What is known of a step once it is over: norm, loss scale and counts, and which gradient was not
finite."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from zero_trial.errors import Diverged
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.precision import LossScale
from zero_trial.sharding.reduce import first_nonfinite


@dataclass(frozen=True)
class NonFiniteStep:
    """A gradient that was not finite. ``rank`` None: only the sum over ranks is known to be bad."""

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
    applied: bool = False  # the parameters have changed
    applied_norm: float | None = None  # of the last step that changed them
    skipped: int = 0
    # numbers of the last skipped steps
    skipped_at: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    nonfinite: NonFiniteStep | None = None


# --- the gradient that was not finite: what each rank knows, and the one that all name


def with_culprit(error: Diverged, culprit: NonFiniteStep | None) -> Diverged:
    """Return ``error`` with the gradient that was not finite, if one is known."""
    if culprit is None:
        return error
    got = f"{error.got}, and {culprit.describe()}"
    return Diverged(error.what, where=error.where, got=got, expected=error.expected, fix=error.fix)


# Degree of doubt, rank, number of the parameter group, parameter: the smallest is the answer.
_CulpritRow = tuple[int, int, int, str]


def find_culprit(model: ShardedModel, step: int) -> NonFiniteStep:
    """Name the first culprit in rank order, the same on every rank. Collective over data, model and
    pipe; only called when there is one.

    In a pipeline the last stage comes first: a bad value spreads from there towards the input.
    """
    rows = model.mesh.data.gather_json(_local_culprits(model), "non-finite gradients")
    everyone = [tuple(row) for found in rows for row in found]
    # the group built last comes first in the model, and a bad value spreads from there towards the
    # input
    answer: list[Any] = []
    if everyone:
        doubt, rank, _, parameter = min(everyone)
        answer = [doubt, rank, parameter]
    parts = [answer for answer in model.mesh.model.gather_json(answer, "non-finite gradients") if answer]
    answer = min(parts, default=[])
    stages = [answer for answer in model.mesh.pipe.gather_json(answer, "non-finite gradients") if answer]
    if not stages:
        return NonFiniteStep(step, None, "an unknown parameter (a row of squares overflowed fp32)")
    least = min(answer[0] for answer in stages)
    doubt, rank, parameter = next(answer for answer in reversed(stages) if answer[0] == least)
    return NonFiniteStep(step, rank if doubt < 2 else None, parameter)


def _local_culprits(model: ShardedModel) -> list[_CulpritRow]:
    """Return what this rank knows of a gradient that is not finite: what the reduction saw, else
    what its shards hold. Local; reads the device."""
    found: list[_CulpritRow] = []
    for culprit in model.reducer.nonfinite:
        doubt = 2 if culprit.rank is None else 0 if culprit.exact else 1
        found.append((doubt, culprit.rank or 0, model.groups.index(culprit.grad_buffer.group), culprit.parameter()))
    for buffer in [] if found else model.grad_buffers:
        group = buffer.group
        position = first_nonfinite(buffer.shard)
        if position is not None:
            slot = group.layout.slot_at(group.layout.shard_range(group.comm.index)[0] + position)
            found.append((2, 0, model.groups.index(group), slot.name if slot is not None else group.name))
    return found
