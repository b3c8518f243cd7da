"""The words for events, as they stand on the screen."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.launch.summary import event_line, training_line
from zero_trial.util.text import byte_text, duration_text, short_number


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
    assert training_line(event) == "train   step 140/200  loss 2.113  9.8k tok/s  lr 2.7e-04  eta 00:12"


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


@pytest.mark.parametrize(
    ("value", "text"), [(9812, "9.8k"), (12.3e6, "12.3M"), (4.25, "4.25"), (0.0134, "0.0134"), (0, "0"), (2e9, "2.0G")]
)
def test_short_numbers(value: float, text: str):
    assert short_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "00:12"), (75, "01:15"), (3723, "1:02:03"), (-1, "00:00")])
def test_clock(seconds: float, text: str):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes(count: int, text: str):
    assert byte_text(count) == text
