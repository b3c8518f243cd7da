"""The best point of a sweep as an experiment that runs: the sweep's own configuration with one value for each range."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml

KEPT_OF_SEARCHER = ("metric", "smaller_is_better")
DROPPED = ("project", "workspace", "checkpoint_policy", "labels")  # of the sweep, not of its best point


def best_experiment(
    config: Mapping[str, Any], hparams: Mapping[str, Any], seed: int | None, ds_config: Any = None
) -> dict[str, Any]:
    """The sweep's configuration with the searcher ``single`` and constant hyperparameters. ``ds_config`` replaces a file that is named.

    Pure; ``config`` is left as it is.
    """
    found = {key: copy.deepcopy(value) for key, value in config.items() if key not in DROPPED}
    searcher = config.get("searcher") or {}
    found["name"] = f"{config.get('name') or 'sweep'}-best"
    found["searcher"] = {"name": "single", **{key: searcher[key] for key in KEPT_OF_SEARCHER if key in searcher}}
    length = _length(searcher)
    if length is not None:
        found["searcher"]["max_length"] = length
    found["hyperparameters"] = as_hyperparameters(hparams)
    if seed is not None:
        found["reproducibility"] = {**(found.get("reproducibility") or {}), "experiment_seed": seed}
    if ds_config is not None:
        found["data"] = {**(found.get("data") or {}), "ds_config": ds_config}
    return found


def as_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as an experiment may hold them: a mapping with a key ``type`` would be read as a range, so it becomes a const."""

    def written(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if "type" in value:
            return {"type": "const", "val": copy.deepcopy(dict(value))}
        return {key: written(inner) for key, inner in value.items()}

    return {key: written(value) for key, value in values.items()}


def as_yaml(experiment: Mapping[str, Any], comment: str) -> str:
    """The experiment as a file, under a line that says what it is. Floats are written so that every YAML reader takes them for numbers."""
    head = " ".join(comment.split())
    return f"# {head}\n" + yaml.safe_dump(dict(experiment), sort_keys=False, allow_unicode=True, width=100)


def _length(searcher: Mapping[str, Any]) -> Any:
    """A whole training, as the searcher states it."""
    if searcher.get("max_time") is not None and searcher.get("time_metric"):
        return {str(searcher["time_metric"]): searcher["max_time"]}
    return copy.deepcopy(searcher.get("max_length"))
