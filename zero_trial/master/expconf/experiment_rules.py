"""The whole experiment: every key at the top, what it may be and what it is where nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.master.expconf.environment_section import BIND_MOUNTS, ENVIRONMENT, RESOURCES
from zero_trial.master.expconf.hyperparameters_section import Hyperparameters, check_counts
from zero_trial.master.expconf.lengths import PERIOD
from zero_trial.master.expconf.other_sections import (
    DATA_LAYER,
    INTEGRATIONS,
    LOG_POLICIES,
    OPTIMIZATIONS,
    PBS,
    PROFILING,
    REPRODUCIBILITY,
    RETENTION,
    SECURITY,
    SLURM,
)
from zero_trial.master.expconf.rules import Either, Flag, Key, Many, Map, Refused, Section, Text, Whole
from zero_trial.master.expconf.searcher_section import SEARCHER
from zero_trial.master.expconf.storage import STORAGE
from zero_trial.master.searchers.grid_points import Grid

ROOT = "<config>"
NO_ENTRYPOINT = "managed experiments require entrypoint"

_COMMAND = Either((Text(), Many(Text())), "is neither a string nor a list of strings")
_NEVER = {"batches": 0}


def _both_places(section: Mapping[str, Any]) -> str | None:
    given = [section.get(name) is not None for name in ("workspace", "project")]
    return "workspace and project must either both be set or neither" if given[0] != given[1] else None


_TOP = Section(
    {
        "name": Key(Text(), required=True),
        "description": Key(Text()),
        "labels": Key(Many(Text()), []),
        "workspace": Key(Text()),
        "project": Key(Text()),
        "entrypoint": Key(_COMMAND),
        "data": Key(Map(), {}),
        "hyperparameters": Key(Hyperparameters(), {}),
        "searcher": Key(SEARCHER, required=True),
        "resources": Key(RESOURCES, {}),
        "environment": Key(ENVIRONMENT, {}),
        "bind_mounts": Key(BIND_MOUNTS, []),
        "checkpoint_storage": Key(STORAGE, required=True),
        "checkpoint_policy": Key(Text(("best", "all", "none")), "best"),
        "min_checkpoint_period": Key(PERIOD, _NEVER),
        "min_validation_period": Key(PERIOD, _NEVER),
        "perform_initial_validation": Key(Flag(), False),
        "scheduling_unit": Key(Whole(1), 100),
        "records_per_epoch": Key(Whole(), 0),
        "max_restarts": Key(Whole(0), 5),
        "preemption_timeout": Key(Whole(1), 3600),
        "reproducibility": Key(REPRODUCIBILITY, {}),
        "profiling": Key(PROFILING, {}),
        "optimizations": Key(OPTIMIZATIONS, {}),
        "log_policies": Key(LOG_POLICIES, []),
        "retention_policy": Key(RETENTION),
        "integrations": Key(INTEGRATIONS),
        "slurm": Key(SLURM, {}),
        "pbs": Key(PBS, {}),
        "debug": Key(Flag(), False),
        "data_layer": Key(DATA_LAYER, {"type": "shared_fs"}),
        "security": Key(SECURITY),
        "tensorboard_storage": Key(Refused("TensorBoard files go to checkpoint_storage. Remove it.")),
        "internal": Key(Refused("is for the master's own use. Remove it.")),
    },
    (_both_places,),
    hint="Settings of your own belong under data: or hyperparameters:.",
)


def check_experiment(config: Mapping[str, Any]) -> list[str]:
    """Every fault of a merged experiment, one line each. Pure."""
    faults = _TOP.check(config, ROOT)
    if not config.get("entrypoint"):
        faults.append(f"{ROOT}.entrypoint: {NO_ENTRYPOINT}")
    return faults + _check_grid(config, faults)


def _check_grid(config: Mapping[str, Any], faults: list[str]) -> list[str]:
    """What a grid needs of the hyperparameters: a count for every range, and an end."""
    searcher, space = config.get("searcher"), config.get("hyperparameters")
    if not isinstance(searcher, Mapping) or searcher.get("name") != "grid" or not isinstance(space, Mapping):
        return []
    path = f"{ROOT}.hyperparameters"
    found = [fault for name, value in space.items() for fault in check_counts(value, f"{path}.{name}")]
    if not found and not faults:
        try:
            Grid.of(space)
        except ConfigError as error:
            found.append(f"{path}: {error.describe()}")
    return found


def fill_experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with every key that Determined knows. ``config`` has no faults."""
    filled: dict[str, Any] = _TOP.fill(config)
    return filled
