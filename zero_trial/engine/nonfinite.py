"""A gradient that is not finite, told by every rank together: which rank, which parameter, which step."""

from __future__ import annotations

from dataclasses import dataclass

from zero_trial.zero import ShardedModel
from zero_trial.zero.reducer import first_bad


@dataclass(frozen=True)
class NonFinite:
    """``rank`` None: only the sum over ranks is known to be bad."""

    step: int
    rank: int | None
    parameter: str

    def describe(self) -> str:
        who = f"on rank {self.rank}" if self.rank is not None else "in the sum over ranks"
        return f"step {self.step}: the gradient of {self.parameter} is not finite {who}"


def name_culprit(model: ShardedModel, step: int) -> NonFinite:
    """The first culprit in rank order, the same answer on every rank. Collective over data; only called when there is one."""
    found: list[tuple[int | None, int, str]] = []
    for culprit in model.reducer.culprits:
        rank = model.mesh.shard.ranks[culprit.shard_index] if culprit.shard_index is not None else None
        found.append((rank, model.units.index(culprit.landing.unit), culprit.parameter()))
    if not found:
        for landing in model.landings:
            position = first_bad(landing.shard)
            if position is not None:
                low, _ = landing.unit.layout.shard_range(landing.unit.comm.index)
                slot = landing.unit.layout.slot_at(low + position)
                found.append((None, model.units.index(landing.unit), slot.name if slot is not None else landing.unit.name))
    everyone = [tuple(row) for rows in model.mesh.data.gather_json(found, "non-finite gradients") for row in rows]
    if not everyone:
        return NonFinite(step, None, "an unknown parameter (a row of squares overflowed fp32)")
    # forward order: the unit built last comes first in the model, and a bad value spreads from there towards the input
    everyone.sort(key=lambda row: (row[0] is None, row[0] if row[0] is not None else 0, row[1]))
    rank, _, parameter = everyone[0]
    return NonFinite(step, rank, parameter)
