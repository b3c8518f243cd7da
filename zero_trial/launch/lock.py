"""The lock file ``config.lock.yaml``: all that is needed to repeat a run, written into its folder before the first rank starts."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from zero_trial.config.experiment import ExperimentConfig

NAME = "config.lock.yaml"
SECTION = "zero_trial"
"""The lock's own facts stand under ``data.zero_trial``: an experiment may hold anything under ``data``."""


@dataclass(frozen=True)
class Locked:
    """What a lock adds to the experiment: where the model is, on how many ranks, from which seed."""

    model_dir: Path
    slots: int
    seed: int


def write_lock(folder: Path, experiment: ExperimentConfig, locked: Locked, ds_config: Mapping[str, Any] | None) -> Path:
    """Write the experiment with everything resolved: the ds_config inside it, the slots and the seed that this run uses.

    Hyperparameters stay as they are: the trial may read a ds_config out of them by itself, and laid over the resolved one it changes nothing.
    The model's folder is noted relative to the lock, so that a project can be moved as a whole.
    """
    content = copy.deepcopy(dict(experiment.raw))
    content["resources"] = {**(content.get("resources") or {}), "slots_per_trial": locked.slots}
    content["reproducibility"] = {**(content.get("reproducibility") or {}), "experiment_seed": locked.seed}
    content["data"] = dict(content.get("data") or {})
    if ds_config is not None:
        content["data"]["ds_config"] = _plain(ds_config)
    content["data"][SECTION] = {
        "model_dir": os.path.relpath(locked.model_dir.resolve(), folder.resolve()),
        "versions": {name: version for name in ("zero_trial", "torch") if (version := _version(name))},
    }
    path = folder / NAME
    head = f"# All that is needed to repeat this run: zero-trial run {NAME}\n"
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def locked_model_dir(experiment: ExperimentConfig) -> Path | None:
    """The model's folder that a lock names, or None when the experiment is no lock."""
    section = experiment.data.get(SECTION)
    if not isinstance(section, Mapping) or not isinstance(section.get("model_dir"), str) or experiment.folder is None:
        return None
    return Path(os.path.normpath(experiment.folder / section["model_dir"]))


def _plain(value: Any) -> Any:
    """Nested mappings and sequences as the dicts and lists that YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
