"""Helpers of the pipeline tests: actions from text, a schedule that is ready to be simulated, and
its report."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from zero_trial.pipeline.lowering import lower
from zero_trial.pipeline.schedule import NONE, Action, ActionKind, Schedule, build
from zero_trial.pipeline.simulator import ALIKE, Costs, SimulationReport, validate

_TEXT = re.compile(r"(\d*)([A-Z_]+)(\d*)")


def parse(text: str) -> Action:
    """Return the action with this text."""
    found = _TEXT.fullmatch(text)
    assert found is not None, text
    chunk, number = (int(part) if part else NONE for part in (found[1], found[3]))
    return Action(ActionKind(found[2]), chunk, number)


def parse_row(text: str) -> tuple[Action, ...]:
    return tuple(map(parse, text.split()))


def lowered(name: str, stages: int, micro_batches: int, chunks: int | None = None, **passes: Any) -> Schedule:
    return lower(build(name, stages, micro_batches, chunks), **passes)


def report(
    name: str, stages: int, micro_batches: int, chunks: int | None = None, costs: Costs = ALIKE, **passes: Any
) -> SimulationReport:
    return validate(lowered(name, stages, micro_batches, chunks, **passes), costs)


def drawn(text: str) -> str:
    """An expected picture as it stands in a test."""
    return "\n".join(line.rstrip() for line in dedent(text).strip().splitlines())
