"""Scalars to Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence

from zero_trial.config.sections import WandbSection
from zero_trial.engine.monitor.writer import Event, load


class Wandb:
    """One run of the project that the section names; ``team`` is the entity. Needs the package wandb."""

    def __init__(self, section: WandbSection) -> None:
        self._run = load("wandb").init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._run.log({name: float(value)}, step=step)

    def flush(self) -> None:
        """The client sends by itself."""

    def close(self) -> None:
        self._run.finish()
