"""Metrics that are collected on every rank and joined once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thread_ranks import run_ranks
from tests.trial.harness import LineTrial, run_world, steps
from zero_trial.errors import TrialError
from zero_trial.trial import Batch, MetricReducer
from zero_trial.trial.metrics import FunctionReducer, ReducerTable
from zero_trial.trial.runtime.protocols import Distributed


def test_a_function_gets_all_ranks_values() -> None:
    def work(ranks: Distributed) -> dict[str, Any]:
        table, reducer = ReducerTable(ranks), FunctionReducer(lambda values: sorted(values)[len(values) // 2])
        table.add(reducer, "median", for_training=False, for_validation=True)
        for value in range(ranks.rank, 6, 2):
            reducer.update(torch.tensor(float(value)))
        return table.reduce(for_training=False)

    assert run_ranks(2, work) == [{"median": 3.0}] * 2


def test_only_the_active_ones_are_asked_and_reset() -> None:
    table, reducer = ReducerTable(Distributed()), FunctionReducer(sum)
    table.add(reducer, "total", for_training=True, for_validation=False)
    reducer.update(2)
    assert table.reduce(for_training=False) == {} and table.reduce(for_training=True) == {"total": 2}
    table.reset(for_training=False)
    assert table.reduce(for_training=True) == {"total": 2}
    table.reset(for_training=True)
    assert table.reduce(for_training=True) == {"total": 0}


def test_names_and_dictionaries() -> None:
    table = ReducerTable(Distributed())
    table.add(FunctionReducer(lambda values: {"low": 1, "high": 2}), None, True, True)
    assert table.reduce(True) == {"low": 1, "high": 2}
    for function, name, message in (
        (sum, None, "must return a dictionary"),
        (lambda values: {}, "x", "must return one metric"),
    ):
        table = ReducerTable(Distributed())
        table.add(FunctionReducer(function), name, True, True)
        with pytest.raises(TrialError, match=message):
            table.reduce(True)


class Count(MetricReducer):
    """Counts samples; a class of the user's."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def per_slot_reduce(self) -> int:
        return self.count

    def cross_slot_reduce(self, per_slot_metrics: list[int]) -> int:
        return sum(per_slot_metrics)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class Counting(LineTrial):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.count = context.wrap_reducer(Count(), "samples_seen", for_validation=False)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.count.count += 2
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def test_in_a_run_they_are_reported_per_period_and_survive_a_resume(tmp_path: Path) -> None:
    first = run_world(2, Counting, steps(6, reporting_period=Batch(4), checkpoint_period=Batch(6)), tmp_path)[0]
    assert [(step, metrics["samples_seen"]) for step, metrics in first.record.training] == [(4, 16), (6, 8)]
    stopped = tmp_path / "stopped"
    run_world(2, Counting, steps(8, reporting_period=Batch(4), checkpoint_period=Batch(6)), stopped)
    rest = run_world(2, Counting, steps(8, reporting_period=Batch(4)), stopped, latest_checkpoint="step-000006")[0]
    assert [(step, metrics["samples_seen"]) for step, metrics in rest.record.training] == [(8, 16)]
