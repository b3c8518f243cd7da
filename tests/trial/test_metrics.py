"""From what a trial returns to one number per name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thread_ranks import run_ranks
from tests.trial.harness import LineTrial, run_world, steps
from zero_trial.errors import TrialError
from zero_trial.trial import Batch, MetricReducer
from zero_trial.trial.metrics import (
    FunctionReducer,
    Reducer,
    ReducerTable,
    add_sums,
    averages,
    evaluation_reducers,
    mean_over_calls,
    over_ranks,
    speed_of,
    training_metrics,
    validation_metrics,
)
from zero_trial.trial.runtime.protocols import Distributed


def test_a_bare_tensor_is_the_loss() -> None:
    loss = torch.tensor([2.0], requires_grad=True)
    metrics = training_metrics(loss, "here")
    assert metrics["loss"].item() == 2.0 and not metrics["loss"].requires_grad
    assert training_metrics({"loss": loss.mean(), "accuracy": 0.5}, "here")["accuracy"].item() == 0.5


@pytest.mark.parametrize("returned", [None, "0.5", [torch.tensor(1.0)], {1: torch.tensor(1.0)}])
def test_anything_else_is_refused_in_the_words_that_users_know(returned: Any) -> None:
    with pytest.raises(TrialError, match="train_batch must return a dictionary mapping string names to Tensor metrics"):
        training_metrics(returned, "rank 0, step 1")


def test_a_loss_that_is_not_a_scalar() -> None:
    message = r"rank 1, step 3: train_batch returned a loss that is not a scalar: got a tensor of shape \(4, 2\), expected one number"
    with pytest.raises(TrialError, match=message + r". Return loss.mean\(\)."):
        training_metrics(torch.zeros(4, 2), "rank 1, step 3")
    with pytest.raises(TrialError, match="accuracy is not a number"):
        training_metrics({"accuracy": object()}, "here")
    with pytest.raises(TrialError, match="complex"):
        training_metrics({"loss": torch.tensor(1j)}, "here")


def test_micro_batches_are_averaged() -> None:
    calls = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
    assert mean_over_calls(calls, "here")["loss"].item() == 2.5
    with pytest.raises(TrialError, match="same metrics for every micro-batch"):
        mean_over_calls([*calls, {"acc": torch.tensor(1.0)}], "here")


def test_sums_of_ranks_and_windows() -> None:
    total = add_sums([{"loss": (3.0, 2)}, {}, {"loss": [5.0, 2], "acc": [1.0, 4]}])
    assert total == {"loss": (8.0, 4), "acc": (1.0, 4)}
    assert averages(total) == {"loss": 2.0, "acc": 0.25}
    assert averages({"loss": (0.0, 0)}) == {}


def test_reducers_over_batches() -> None:
    batches = [{"m": torch.tensor(number), "name": b"dropped"} for number in (1.0, 3.0, 2.0)]
    for reducer, value in ((Reducer.AVG, 2.0), (Reducer.SUM, 6.0), (Reducer.MAX, 3.0), (Reducer.MIN, 1.0)):
        assert validation_metrics(batches, {"m": reducer}, "here") == {"m": value}
    vectors = [{"m": [1.0, 2.0]}, {"m": torch.tensor([3.0, 4.0])}]
    assert validation_metrics(vectors, {}, "here") == {"m": [2.0, 3.0]} and validation_metrics([], {}, "here") == {}
    assert evaluation_reducers(Reducer.MAX, ["a", "b"]) == {"a": Reducer.MAX, "b": Reducer.MAX}
    assert evaluation_reducers({"a": Reducer.MIN}, ["a", "b"]) == {"a": Reducer.MIN, "b": Reducer.AVG}


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([{"m": 1.0}, {"n": 1.0}], "Validation metric names must match across all batches of data"),
        ([{"m": None}], "the validation metric m is None"),
        ([{"m": [1.0]}, {"m": [1.0, 2.0]}], "changes its shape"),
        ([0.5], "evaluate_batch must return a dictionary"),
        ([{"m": "word"}], "m is not a number"),
        ([{"loss": torch.tensor(1j)}], "complex"),
    ],
)
def test_what_evaluate_batch_must_not_return(batches: list[Any], message: str) -> None:
    with pytest.raises(TrialError, match=message):
        validation_metrics(batches, {}, "here")


def test_ranks_are_weighed_by_their_batches_and_silent_ones_left_out() -> None:
    parts: list[tuple[dict[str, Any], int]] = [
        ({"a": 1.0, "s": 1.0, "v": [1.0, 2.0]}, 3),
        ({}, 0),
        ({"a": 5.0, "s": 2.0, "v": [5.0, 6.0]}, 1),
    ]
    assert over_ranks(parts, {"s": Reducer.SUM}) == {"a": 2.0, "s": 3.0, "v": [2.0, 3.0]}
    assert over_ranks([({}, 0)], {}) == {}


@pytest.mark.parametrize("other", [{"a": 1.0}, {"a": 1.0, "b": [1.0]}, {"a": 1.0, "c": [1.0, 2.0]}])
def test_ranks_must_agree_on_names_and_shapes(other: dict[str, Any]) -> None:
    with pytest.raises(TrialError, match=r"rank 2: .* as on rank 0: a, b \[2\]"):
        over_ranks([({"a": 1.0, "b": [1.0, 2.0]}, 1), ({}, 0), (other, 1)], {})


@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [(0, (4, 1 / 1.5)), (1, (4, 1 / 1.5)), (2, (3, 0.5)), (3, (2, 0.5)), (4, (1, 0.5)), (5, (0, 0.0)), (9, (0, 0.0))],
)
def test_the_speed_of_the_steps_after_the_warm_up(warm_up: int, expected: tuple[int, float]) -> None:
    """Spans of 0.5, 1, 2 and 2 seconds between five steps."""
    assert speed_of([9.0, 9.5, 10.5, 12.5, 14.5], warm_up) == pytest.approx(expected)


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
