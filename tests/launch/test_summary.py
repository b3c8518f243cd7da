"""The last lines of a run."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.launch.screen import done_line


def test_a_whole_summary():
    summary = {
        "train_seconds": 41.3,
        "ranks": 2,
        "zero_stage": 2,
        "seed": 7,
        "tokens_per_second": 9812.0,
        "samples_per_second": 9.0,
        "initial_validation": {"val_bits_per_byte": 8.04},
        "final_validation": {"val_bits_per_byte": 3.123},
        "unigram_bits_per_byte": 4.61,
        "xz_bits_per_byte": 2.31,
        "peak_memory_bytes": [60 * 2**20, 61 * 2**20],
    }
    assert done_line(summary) == (
        "done    41 s · val_bits_per_byte 8.04 -> 3.123 (unigram 4.61, xz 2.31) · 9.81k tok/s · peak 61.0 MiB/rank · 2 ranks · ZeRO-2 · seed 7"
    )


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({}, "finished"),
        ({"train_seconds": 7200, "final_validation": {"acc": 0.5}, "ranks": 1}, "2:00:00 · acc 0.5 · 1 rank"),
        ({"initial_validation": {"acc": 0.5}, "final_validation": {"acc": 0.5}}, "finished · acc 0.5"),
    ],
)
def test_only_what_is_known(summary: dict[str, Any], said: str):
    assert done_line(summary) == f"done    {said}"


def test_live_tensors_stand_beside_their_plan():
    """The process's peak holds interpreter and libraries; this figure is the one that the plan was
    about."""
    measured = {"memory_measured_peak_bytes": 30 * 2**20, "ranks": 2}
    planned = {"memory_planned_bytes": 31 * 2**20, "memory_plan_error_percent": 3.33}
    line = done_line(measured | planned)
    assert line == "done    finished · tensors 30.0 MiB/rank (planned 31.0 MiB, error +3.3 %) · 2 ranks"
    assert done_line(measured) == "done    finished · tensors 30.0 MiB/rank · 2 ranks"
    assert done_line(planned) == "done    finished"


def test_baselines_are_figures_of_the_same_quantity():
    summary = {
        "final_validation": {"accuracy": 0.9, "validation_loss": 0.3},
        "chance_accuracy": 0.1,
        "train_loss": 0.2,
        "noise_loss": float("nan"),
    }
    line = done_line(summary)
    assert "accuracy 0.9 (chance 0.1)" in line and "validation_loss 0.3 (train 0.2)" in line
