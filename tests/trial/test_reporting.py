"""Reports, stragglers, the summary and the outcome: the moment of an exchange changes nothing in
them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.trial import Batch, TrialCallback
from zero_trial.trial.reporting import StragglerWatch, build_summary


def clock(step_seconds: float) -> Any:
    """Time goes on by as much at every look."""
    ticks = count()
    return lambda: next(ticks) * step_seconds


def test_the_pace_of_the_exchanges_does_not_show_in_the_reports() -> None:
    slow = run_rank(LineTrial, steps(12, reporting_period=Batch(5)), clock=clock(10.0))
    fast = run_rank(LineTrial, steps(12, reporting_period=Batch(5)), clock=clock(1e-6))
    assert slow.record.training == fast.record.training
    assert [step for step, _ in slow.record.training] == [5, 10, 12]
    trained = [[event["step"] for event in run.record.events if event["kind"] == "train"] for run in (slow, fast)]
    assert trained == [list(range(1, 13)), [1, 3, 5, 9, 10, 12]]


def test_every_steps_own_values_are_reported_at_any_pace() -> None:
    for seconds in (10.0, 1e-6):
        run = run_rank(LineTrial, steps(12, reporting_period=Batch(5)), clock=clock(seconds))
        trained = [event for event in run.record.events if event["kind"] == "train"]
        assert [value for event in trained for value in event["each"]["loss"]] == run.trial.losses
        ends = [event["step"] for event in trained]
        assert [len(event["each"]["loss"]) for event in trained] == [
            b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)
        ]


def test_averages_are_over_the_period() -> None:
    run = run_rank(LineTrial, steps(6, reporting_period=Batch(3)))
    for (_, metrics), part in zip(run.record.training, (run.trial.losses[:3], run.trial.losses[3:]), strict=True):
        assert metrics["loss"] == pytest.approx(sum(part) / 3, rel=1e-6)
    assert run.record.progress == [0.5, 1.0, 1.0]


def test_callbacks_get_the_averages_and_this_ranks_values() -> None:
    got: list[Any] = []

    class Workload(TrialCallback):
        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
            got.append((avg_metrics, batch_metrics))

    class WithWorkload(LineTrial):
        def build_callbacks(self) -> dict[str, TrialCallback]:
            return {"workload": Workload()}

    run = run_rank(WithWorkload, steps(4, reporting_period=Batch(2)))
    assert [len(batches) for _, batches in got] == [2, 2]
    assert [batch["loss"] for _, batches in got for batch in batches] == pytest.approx(run.trial.losses)


def test_tokens_per_second_where_samples_have_tokens() -> None:
    class Tokens(LineTrial):
        tokens_per_sample = 16

    events = [event for event in run_rank(Tokens, steps(2), clock=clock(1.0)).record.events if event["kind"] == "train"]
    assert all(event["tokens_per_second"] == 16 * event["samples_per_second"] for event in events)


@pytest.mark.parametrize(("norm", "reported"), [(1.5, 1.5), (None, None), (float("inf"), None)])
def test_the_gradient_norm_where_an_engine_says_one(norm: float | None, reported: float | None) -> None:
    class WithNorm(LineTrial):
        def build_training_data_loader(self) -> Any:
            self.context.engines[0].get_global_grad_norm = lambda: norm
            return super().build_training_data_loader()

    events = [event for event in run_rank(WithNorm, steps(1)).record.events if event["kind"] == "train"]
    assert [event.get("grad_norm") for event in events] == [reported]


def watch(*talks: tuple[int, Sequence[float | None]]) -> list[str]:
    """What is said after talks at these steps."""
    watched = StragglerWatch()
    return [reported for step, busy in talks if (reported := watched.observe(step, busy)) is not None]


def test_a_slow_rank_is_named_with_its_times() -> None:
    (reported,) = watch((1, (9.0, 0.0, 0.0)), (5, (0.4, 0.2, 2.0)), (9, (0.4, 0.4, 2.0)), (13, (0.4, 0.4, 2.0)))
    assert reported == (
        "rank 2 delays the others: in steps 6 to 9 it was busy 0.50 s per step, others 0.10 s. "
        "Check its data loading, and what else runs on its host"
    )


def test_short_talks_are_joined_to_a_stretch() -> None:
    talks = [(step, (0.010, 0.050)) for step in range(1, 20)]
    (reported,) = watch(*talks)
    assert reported.startswith("rank 1 delays the others: in steps 6 to 9 it was busy 50.0 ms per step, others 10.0 ms")


@pytest.mark.parametrize(
    "stretches",
    [
        [(0.4, 2.0), (0.4, 0.4), (0.4, 2.0), (0.4, 0.4)],  # now and then
        [(0.4, 2.0), (2.0, 0.4), (0.4, 2.0)],  # each in its turn
        [(0.4, 0.79), (0.4, 0.79)],  # not twice as long
        [(0.02, 0.064), (0.02, 0.064)],  # 11 ms per step: a loaded machine
        [(0.4, None), (0.4, None)],
        [(0.4,), (0.4,)],
    ],
)
def test_nothing_is_said(stretches: list[tuple[float | None, ...]]) -> None:
    assert watch((1, stretches[0]), *((5 + 4 * number, busy) for number, busy in enumerate(stretches))) == []


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
    names = ("step", "samples", "zero_stage", "seed", "ranks")
    assert [summary[name] for name in names] == [5, 20, 2, 3, 1]
    assert summary["samples_per_second"] == pytest.approx(20 / summary["train_seconds"])
    assert summary["tokens_per_second"] == pytest.approx(80 / summary["train_seconds"])
    assert summary["initial_validation"] == {"validation_loss": run.record.validation[0][1]["validation_loss"]}
    before, after = (summary[f"{when}_validation"]["validation_loss"] for when in ("initial", "final"))
    assert after == summary["validation_loss"] < before
    assert (summary["unigram_bits_per_byte"], summary["repeat"], summary["parameters"]) == (4.8, "again", 2)


def test_the_stages_of_a_pipeline() -> None:
    run = run_rank(LineTrial, steps(1))
    assert "pipeline_stages" not in build_summary(run.outcome, run.trial, run.trial.context, {})
    run.trial.engine.is_pipe_parallel = True
    assert build_summary(run.outcome, run.trial, run.trial.context, {})["pipeline_stages"] == 1
