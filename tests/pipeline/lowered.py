"""Helpers of the pipeline tests: a schedule that is ready to be simulated, its report, and its
picture."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

from zero_trial.pipeline.draw import grid
from zero_trial.pipeline.generators import build
from zero_trial.pipeline.lowering import lower
from zero_trial.pipeline.schedule import Schedule
from zero_trial.pipeline.simulator import ALIKE, Costs, SimulationReport, validate


def lowered(name: str, stages: int, micro_batches: int, chunks: int | None = None, **passes: Any) -> Schedule:
    return lower(build(name, stages, micro_batches, chunks), **passes)


def report(
    name: str, stages: int, micro_batches: int, chunks: int | None = None, costs: Costs = ALIKE, **passes: Any
) -> SimulationReport:
    return validate(lowered(name, stages, micro_batches, chunks, **passes), costs)


def picture(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> str:
    return grid(report(name, stages, micro_batches, chunks))


def drawn(text: str) -> str:
    """An expected picture as it stands in a test."""
    return "\n".join(line.rstrip() for line in dedent(text).strip().splitlines())
