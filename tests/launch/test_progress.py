"""The words for events, as they stand on the screen."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.launch.screen import event_line, training_line


def test_a_training_line():
    event = {
        "kind": "train",
        "step": 140,
        "total_steps": 200,
        "loss": 2.1134,
        "tokens_per_second": 9812.0,
        "samples_per_second": 9.0,
        "lr": 2.7e-4,
        "eta_seconds": 12.3,
    }
    assert training_line(event) == "train   step 140/200  loss 2.113  9.81k tok/s  lr 2.7e-04  eta 00:12"


def test_every_metric_of_train_batch_is_on_the_line():
    event = {"kind": "train", "step": 3, "loss": 2.0, "accuracy": 0.25, "each": {"accuracy": [0.25], "loss": [2.0]}}
    assert training_line(event) == "train   step 3  loss 2  accuracy 0.25"


def test_what_is_not_known_is_not_shown():
    assert training_line({"kind": "train", "step": 3}) == "train   step 3"
    assert training_line({"kind": "train", "step": 3, "samples_per_second": 12.0}) == "train   step 3  12 samples/s"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"kind": "validation", "step": 200, "metrics": {"loss": 2.0411, "batches": 200}},
            "eval    step 200  loss 2.041",
        ),
        (
            {"kind": "checkpoint", "path": "runs/0001/checkpoints/step-000200", "bytes": 15000000},
            "saved   runs/0001/checkpoints/step-000200  14.3 MiB",
        ),
        ({"kind": "note", "message": "ranks differ"}, "note    ranks differ"),
        ({"kind": "plan", "message": "params 1.2M  fits", "stage": 2}, "plan    params 1.2M  fits"),
        ({"kind": "done"}, None),
        ({"kind": "unknown"}, None),
        ({}, None),
    ],
)
def test_other_events(event: dict[str, Any], line: str | None):
    assert event_line(event) == line
