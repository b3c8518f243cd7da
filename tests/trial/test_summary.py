"""The figures of a run that ended well."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.trial.reporting import build_summary, zero_stage


class Sequences(LineTrial):
    tokens_per_sample = 4

    def summary(self) -> dict[str, Any]:
        return {"unigram_bits_per_byte": 4.8}


def test_what_it_says() -> None:
    ticks = iter(range(10_000))
    config = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
    run = run_rank(
        Sequences, steps(5, step_zero_validation=True), ds_config=config, seed=3, clock=lambda: float(next(ticks))
    )
    summary = build_summary(run.outcome, run.trial, run.trial.context, {"repeat": "again"})
    assert (summary["step"], summary["samples"], summary["zero_stage"], summary["seed"], summary["ranks"]) == (
        5,
        20,
        2,
        3,
        1,
    )
    assert summary["samples_per_second"] == pytest.approx(20 / summary["train_seconds"])
    assert summary["tokens_per_second"] == pytest.approx(80 / summary["train_seconds"])
    assert summary["initial_validation"] == {"validation_loss": run.record.validation[0][1]["validation_loss"]}
    assert (
        summary["final_validation"]["validation_loss"]
        == summary["validation_loss"]
        < summary["initial_validation"]["validation_loss"]
    )
    assert (summary["unigram_bits_per_byte"], summary["repeat"], summary["parameters"]) == (4.8, "again", 2)


def test_the_stage_that_the_engine_itself_names_counts() -> None:
    run = run_rank(LineTrial, steps(1))
    assert zero_stage(run.trial.context) == 0
    run.trial.engine.zero_optimization_stage = lambda: 3
    assert zero_stage(run.trial.context) == 3


def test_the_stages_of_a_pipeline() -> None:
    run = run_rank(LineTrial, steps(1))
    assert "pipeline_stages" not in build_summary(run.outcome, run.trial, run.trial.context, {})
    run.trial.engine.is_pipe_parallel = True
    assert build_summary(run.outcome, run.trial, run.trial.context, {})["pipeline_stages"] == 1
