"""What is known of a step once it is over: norm, loss scale and counts, and which gradient was not
finite."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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


def find_culprit(model: ShardedModel, step: int) -> NonFiniteStep:
    """Name the first rank whose gradient was not finite, the same on every rank. Collective over
    data, model and pipe; only called when there is one.

    In a pipeline the last stage comes first, and in a model the group that is built last: a bad
    value spreads from there towards the input.
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
    """Return what this rank knows, least first: what the reduction saw, else what its shards hold.
    Local; reads the device.

    A row has whether the rank is in doubt, the rank, the index of the group, and the parameter.
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
