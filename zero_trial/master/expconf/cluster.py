"""What a cluster adds to an experiment that says nothing itself, as a configuration that lies under the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ENVIRONMENT = ("image", "environment_variables", "force_pull_image", "registry_auth", "add_capabilities")


@dataclass(frozen=True)
class ClusterDefaults:
    """``checkpoint_storage`` and ``task_container_defaults`` of the master's own configuration; and, because both are random on a real master,
    the ``name`` and the ``experiment_seed`` of an experiment without one.
    """

    checkpoint_storage: Mapping[str, Any] | None = None
    task_container_defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "Experiment"
    experiment_seed: int = 0

    def as_config(self) -> dict[str, Any]:
        """The same as an experiment configuration."""
        tasks = self.task_container_defaults
        return {
            "name": self.name,
            "reproducibility": {"experiment_seed": self.experiment_seed},
            "checkpoint_storage": self.checkpoint_storage and dict(self.checkpoint_storage),
            "environment": {key: tasks.get(key) for key in (*_ENVIRONMENT, "drop_capabilities")},
            "resources": {"devices": tasks.get("devices"), "shm_size": tasks.get("shm_size_bytes")},
            **{key: tasks.get(key) for key in ("bind_mounts", "slurm", "pbs", "log_policies", "preemption_timeout")},
        }
