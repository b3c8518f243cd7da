"""A schedule: for each pipeline rank the actions that it performs in one step, and what they promise to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zero_trial.errors import ConfigError
from zero_trial.pipeline.actions import Action
from zero_trial.pipeline.placement import Placement

Row = tuple[Action, ...]


class ScheduleError(ConfigError):
    """A schedule that would hang, or compute something else than the model's gradients."""


class Parameters(str, Enum):
    """How long a chunk's full parameters live at ZeRO stage 3."""

    HOLD = "hold"  # from the chunk's first use in a step to its last: 1 gather per chunk
    CHUNK = "chunk"  # while the rank stays with the chunk: as many gathers as the schedule has runs of it
    FREE = (
        "free"  # for one computation: 2 gathers per chunk and micro-batch, 3 where input and weight gradients are apart
    )


class Reduction(str, Enum):
    """When a chunk's gradients are reduced."""

    BOUNDARY = "boundary"  # after its last backward: 1 reduction per chunk, the full gradients live until then
    MICRO = "micro"  # after each backward: 1 reduction per chunk and micro-batch, only shards live in between


@dataclass(frozen=True)
class Schedule:
    """``rows[r]`` are rank r's actions. The other fields say what the passes have added, so that a validator can miss it.

    ``parameters`` is None where parameters are never freed (ZeRO stages 0, 1 and 2); ``reduction`` None where no gradients are reduced;
    ``ties`` are groups of chunks that share a weight.
    """

    name: str
    placement: Placement
    micro_batches: int
    rows: tuple[Row, ...]
    training: bool = True
    parameters: Parameters | None = None
    reduction: Reduction | None = None
    ties: tuple[tuple[int, ...], ...] = ()
    steps: bool = False

    @property
    def stages(self) -> int:
        return self.placement.stages
