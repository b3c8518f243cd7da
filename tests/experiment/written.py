"""Experiments as they are written: a small good one, with one thing changed."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from zero_trial.experiment.rules import ClusterDefaults, CompletedConfig, InvalidExperiment, complete

BASE = {
    "name": "e",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
    "hyperparameters": {},
}
CLUSTER = ClusterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "/storage"}, experiment_seed=11)


def completed(changes: str, cluster: ClusterDefaults = CLUSTER, **more: Any) -> CompletedConfig:
    """``changes`` is YAML that replaces top-level keys of the small experiment."""
    return complete(yaml.safe_dump(BASE | yaml.safe_load(changes)), cluster, **more)


def section(changes: str, name: str) -> Any:
    return completed(changes).config[name]


def refused(changes: str, **more: Any) -> list[str]:
    """The faults, one line each."""
    with pytest.raises(InvalidExperiment) as error:
        completed(changes, **more)
    assert all("\n" not in message for message in error.value.messages)
    return error.value.messages


def judge(changes: str, fault: str | None) -> None:
    """``fault`` is one of the faults' lines, without "<config>."; None: there are none."""
    if fault is None:
        completed(changes)
    else:
        messages = refused(changes)
        assert f"<config>.{fault}" in messages, messages
