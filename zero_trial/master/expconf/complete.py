"""An experiment's YAML made whole: old forms rewritten, the cluster's defaults laid under it, every key checked as a real master does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.errors import ConfigError


class InvalidExperiment(ConfigError):
    """An experiment that a real master would refuse; ``messages`` holds every fault as one line."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(["invalid experiment configuration:", *(f"  {line}" for line in messages)]))


@dataclass(frozen=True)
class ClusterDefaults:
    """What the cluster adds where the experiment says nothing: ``checkpoint_storage``, ``task_container_defaults``, and, because both are
    random on a real master, the ``name`` and the ``experiment_seed`` of an experiment without one.
    """

    checkpoint_storage: Mapping[str, Any] | None = None
    task_container_defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "Experiment"
    experiment_seed: int = 0


@dataclass(frozen=True)
class CompletedConfig:
    """``config``: every key of an experiment with its value, as JSON data. ``warnings``: one line each."""

    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def complete(
    yaml_text: str, defaults: ClusterDefaults, *, template: Mapping[str, Any] | None = None
) -> CompletedConfig:
    """The completed experiment, or InvalidExperiment with all its faults. ``template`` is a config that lies under the YAML. Pure."""
    raise NotImplementedError
