"""Scalars to Comet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_trial.config.sections import CometSection
from zero_trial.engine.monitor.writer import Event, load


class Comet:
    """An experiment as the section describes it. Of every name, an event is sent when at least ``samples_log_interval`` samples
    have gone by since the last one. Needs the package comet_ml."""

    def __init__(self, section: CometSection) -> None:
        comet = load("comet_ml")
        options = {
            "api_key": section.api_key,
            "project": section.project,
            "workspace": section.workspace,
            "experiment_key": section.experiment_key,
            "mode": section.mode,
            "online": section.online,
        }
        self._experiment: Any = comet.start(**{key: value for key, value in options.items() if value is not None})
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._sent: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            if name not in self._sent or step - self._sent[name] >= self._interval:
                self._sent[name] = step
                self._experiment.log_metric(name, float(value), step=step)

    def flush(self) -> None:
        self._experiment.flush()

    def close(self) -> None:
        self._experiment.end()
