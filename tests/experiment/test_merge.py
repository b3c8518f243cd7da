"""Laying one configuration over another."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.rules import merge

A, B = {"host_path": "/a", "container_path": "/x"}, {"host_path": "/b", "container_path": "/x"}
C = {"host_path": "/c", "container_path": "/y"}


@pytest.mark.parametrize(
    ("above", "below", "merged"),
    [
        ({"name": "a"}, {"name": "b", "debug": True}, {"name": "a", "debug": True}),
        ({"name": None}, {"name": "b"}, {"name": "b"}),
        ({"name": "a"}, {"name": None}, {"name": "a"}),
        ({"resources": {"priority": 1}}, {"resources": {"weight": 2}}, {"resources": {"priority": 1, "weight": 2}}),
        ({"bind_mounts": [A]}, {"bind_mounts": [B, C]}, {"bind_mounts": [A, C]}),
        ({"labels": ["a"]}, {"labels": ["a", "b"]}, {"labels": ["a", "b"]}),
        (
            {"environment": {"environment_variables": {"cpu": ["A=1"]}}},
            {"environment": {"environment_variables": {"cpu": ["A=0"], "cuda": ["B"]}}},
            {"environment": {"environment_variables": {"cpu": ["A=0", "A=1"], "cuda": ["B"]}}},
        ),
        (
            {"environment": {"add_capabilities": ["A"]}},
            {"environment": {"add_capabilities": ["B"]}},
            {"environment": {"add_capabilities": ["A"]}},
        ),
        ({"slurm": {"sbatch_args": ["a"]}}, {"slurm": {"sbatch_args": ["b"]}}, {"slurm": {"sbatch_args": ["b", "a"]}}),
        (
            {"log_policies": [{"name": "a", "action": "x"}, {"pattern": "p"}]},
            {"log_policies": [{"name": "a", "action": "y"}, {"pattern": "q"}]},
            {"log_policies": [{"name": "a", "action": "x"}, {"pattern": "p"}, {"pattern": "q"}]},
        ),
        ({"data": {"a": {"b": 1}}}, {"data": {"a": {"c": 2}, "d": 3}}, {"data": {"a": {"b": 1}, "d": 3}}),
        # Kinds of storage and of searcher are not mixed, except for what all kinds share.
        (
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "save_trial_best": 3}},
            {"checkpoint_storage": {"type": "s3", "prefix": "p", "save_trial_best": 9, "save_trial_latest": 9}},
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "save_trial_best": 3, "save_trial_latest": 9}},
        ),
        (
            {"checkpoint_storage": {"save_trial_best": 3}},
            {"checkpoint_storage": {"type": "gcs", "bucket": "b"}},
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "save_trial_best": 3}},
        ),
        (
            {"searcher": {"name": "single", "metric": "loss"}},
            {"searcher": {"name": "random", "max_trials": 5, "source_checkpoint_uuid": "u"}},
            {"searcher": {"name": "single", "metric": "loss", "source_checkpoint_uuid": "u"}},
        ),
        # Hyperparameters: namespaces are united, ranges and values are not; a null is a value.
        (
            {"hyperparameters": {"a": {"b": 1}}},
            {"hyperparameters": {"a": {"c": 2}, "d": 3}},
            {"hyperparameters": {"a": {"b": 1, "c": 2}, "d": 3}},
        ),
        (
            {"hyperparameters": {"a": {"type": "int", "minval": 1, "maxval": 2}}},
            {"hyperparameters": {"a": {"type": "int", "minval": 3, "maxval": 4, "count": 5}}},
            {"hyperparameters": {"a": {"type": "int", "minval": 1, "maxval": 2}}},
        ),
        (
            {"hyperparameters": {"a": {"b": 1}}},
            {"hyperparameters": {"a": {"type": "const", "val": 1}}},
            {"hyperparameters": {"a": {"b": 1}}},
        ),
        ({"hyperparameters": {"a": None}}, {"hyperparameters": {"a": {"b": 1}}}, {"hyperparameters": {"a": None}}),
    ],
)
def test_merging(above: dict[str, Any], below: dict[str, Any], merged: dict[str, Any]):
    assert merge(above, below) == merged


def test_nothing_is_shared():
    below = {"data": {"a": [1]}}
    merged = merge({}, below)
    merged["data"]["a"].append(2)
    assert below == {"data": {"a": [1]}}
