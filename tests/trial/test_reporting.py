"""When ranks talk changes nothing in what is reported."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.trial import Batch, TrialCallback
from zero_trial.trial.reporting import StepTimer


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


def test_every_steps_own_values_are_told_at_whatever_pace() -> None:
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


def test_the_timer_leaves_out_what_lies_between() -> None:
    now = [0.0]
    timer = StepTimer(lambda: now[0])
    timer.start()
    now[0] = 3.0
    timer.stop()
    now[0] = 10.0
    assert timer.seconds == 3.0
    timer.start()
    now[0] = 12.0
    assert timer.seconds == 5.0


@pytest.mark.parametrize(("norm", "told"), [(1.5, 1.5), (None, None), (float("inf"), None)])
def test_the_gradient_norm_where_an_engine_says_one(norm: float | None, told: float | None) -> None:
    class WithNorm(LineTrial):
        def build_training_data_loader(self) -> Any:
            self.context.engines[0].get_global_grad_norm = lambda: norm
            return super().build_training_data_loader()

    events = [event for event in run_rank(WithNorm, steps(1)).record.events if event["kind"] == "train"]
    assert [event.get("grad_norm") for event in events] == [told]
