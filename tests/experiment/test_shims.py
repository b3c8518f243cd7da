"""Older forms, rewritten."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.rules import modern


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ({"environment": {"image": "x"}}, {"environment": {"image": {"cpu": "x", "cuda": "x", "rocm": "x"}}}, ""),
        (
            {"environment": {"image": {"cpu": "x", "gpu": "y"}}},
            {"environment": {"image": {"cuda": "y", "cpu": "x"}}},
            "environment.image.gpu is the older name of environment.image.cuda",
        ),
        (
            {"environment": {"environment_variables": {"gpu": ["A"], "cuda": ["B"]}}},
            {"environment": {"environment_variables": {"cuda": ["B"]}}},
            "environment.environment_variables.gpu is the older name of environment.environment_variables.cuda",
        ),
        (
            {"resources": {"devices": ["/a:/b", "/a:/b:r", "/a"]}},
            {
                "resources": {
                    "devices": [
                        {"host_path": "/a", "container_path": "/b"},
                        {"host_path": "/a", "container_path": "/b", "mode": "r"},
                        "/a",
                    ]
                }
            },
            "",
        ),
        (
            {"resources": {"agent_label": "x"}},
            {"resources": {}},
            "resources.agent_label has been removed from Determined, and has no effect",
        ),
        (
            {"log_policies": [{"pattern": "a", "action": {"type": "exclude_node"}}]},
            {"log_policies": [{"pattern": "a", "action": "exclude_node"}]},
            "log_policies: action is written as a word today, such as action: cancel_retries",
        ),
        (
            {"records_per_epoch": 5},
            {"records_per_epoch": 5},
            "records_per_epoch is read by no trial of today, and has no effect",
        ),
        (
            {"searcher": {"name": "adaptive_asha", "max_length": {"batches": 5}}},
            {"searcher": {"name": "adaptive_asha", "max_length": {"batches": 5}}},
            "searcher.max_length has no effect in adaptive_asha: max_time and time_metric count",
        ),
        (
            {"searcher": {"name": "adaptive_asha", "stop_once": False}},
            {"searcher": {"name": "adaptive_asha", "stop_once": False}},
            "searcher.stop_once has no effect: adaptive_asha stops every trial for good",
        ),
    ],
)
def test_old_forms(old: dict[str, Any], new: dict[str, Any], warning: str):
    assert modern(old) == (new, [warning] if warning else [])


@pytest.mark.parametrize(
    "odd",
    [
        {"environment": 3},
        {"environment": {"image": 3, "environment_variables": "A"}},
        {"resources": {"shm_size": "lots", "devices": "x"}},
        {"resources": {"shm_size": "1g"}, "data_layer": 3},
        {"log_policies": [3, {"action": {"type": "x", "url": "u"}}]},
        {"searcher": []},
    ],
)
def test_what_is_not_understood_stays(odd: dict[str, Any]):
    assert modern(odd) == (odd, [])
