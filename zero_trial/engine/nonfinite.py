"""A gradient that is not finite, told by every rank together: which rank, which parameter, which step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_trial.errors import Diverged
from zero_trial.zero import ShardedModel
from zero_trial.zero.reducer import Culprit, first_bad

# Freed parameters read as NaN, so that a use outside their module's forward shows.
_OUTSIDE = (
    " (the forward of {block} has not run, and only while it runs are its parameters whole: call it instead of reading its weights, "
    "or raise zero_optimization.stage3_param_persistence_threshold)"
)


@dataclass(frozen=True)
class NonFinite:
    """``rank`` None: only the sum over ranks is known to be bad. ``hint``: a likely cause, if one is known."""

    step: int
    rank: int | None
    parameter: str
    hint: str = ""

    def describe(self) -> str:
        who = f"on rank {self.rank}" if self.rank is not None else "in the sum over ranks"
        return f"step {self.step}: the gradient of {self.parameter} is not finite {who}{self.hint}"


def blame(error: Diverged, culprit: NonFinite | None) -> Diverged:
    """``error`` with the gradient that was not finite, if one is known."""
    if culprit is None:
        return error
    got = f"{error.got}, and {culprit.describe()}"
    return Diverged(error.what, where=error.where, got=got, expected=error.expected, fix=error.fix)


# How little is known, rank, number of the unit, parameter: the smallest is the answer.
Row = tuple[int, int, int, str]


def name_culprit(model: ShardedModel, step: int) -> NonFinite:
    """The first culprit in rank order, the same answer on every rank. Collective over data, model and pipe; only called when there is one."""
    return agree(model, step, evidence(model, model.reducer.culprits), model.gatherer.was_used)


def evidence(
    model: ShardedModel, culprits: Sequence[Culprit], sums: Mapping[int, torch.Tensor] | None = None
) -> list[Row]:
    """What this rank knows of a gradient that is not finite: whom the reduction saw, else what lies in its shards. Local; reads the device.

    ``sums``: of squares, by number of landing, for when something else may have landed in the shards since: they still tell the unit.
    """
    found: list[Row] = []
    for culprit in culprits:
        doubt = 2 if culprit.rank is None else 0 if culprit.exact else 1
        found.append((doubt, culprit.rank or 0, model.units.index(culprit.landing.unit), culprit.parameter()))
    for index, landing in enumerate([] if culprits else model.landings):
        unit, total = landing.unit, (sums or {}).get(index)
        if total is not None and bool(torch.isfinite(total)):
            continue
        position = first_bad(landing.shard)
        if position is not None:
            slot = unit.layout.slot_at(unit.layout.shard_range(unit.comm.index)[0] + position)
            found.append((2, 0, model.units.index(unit), slot.name if slot is not None else unit.name))
        elif total is not None:
            found.append((3, 0, model.units.index(unit), unit.name))
    return found


def agree(model: ShardedModel, step: int, found: Sequence[Row], was_used: Callable[[str], bool]) -> NonFinite:
    """The one culprit of what all ranks have ``found``; ``was_used(block)``: its forward had run. Collective over data, model and pipe.

    In a pipeline the last stage comes first: a bad value spreads from there towards the input.
    """
    everyone = [tuple(row) for rows in model.mesh.data.gather_json(list(found), "non-finite gradients") for row in rows]
    answer: list[Any] = []
    if everyone:
        # the unit built last comes first in the model, and a bad value spreads from there towards the input
        doubt, rank, index, parameter = min(everyone)
        block = model.units[index].block
        answer = [doubt, rank, parameter, "" if was_used(block) else _OUTSIDE.format(block=block)]
    parts = [answer for answer in model.mesh.model.gather_json(answer, "non-finite gradients") if answer]
    answer = min(parts, default=[])
    stages = [answer for answer in model.mesh.pipe.gather_json(answer, "non-finite gradients") if answer]
    if not stages:
        return NonFinite(step, None, "an unknown parameter (a row of squares overflowed fp32)")
    least = min(answer[0] for answer in stages)
    doubt, rank, parameter, hint = next(answer for answer in reversed(stages) if answer[0] == least)
    return NonFinite(step, rank if doubt < 2 else None, parameter, hint)
