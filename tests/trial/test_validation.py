"""Validation on every rank, one set of metrics for all."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from tests.trial.fake_engine import FakeEngine
from tests.trial.harness import LineTrial, Points, run_rank, run_world, steps
from zero_trial.errors import ConfigError, DataError
from zero_trial.trial import Batch, DataLoader, Reducer
from zero_trial.trial.validation import Validator, reported_metrics


class Indices(LineTrial):
    """Reports what its validation batches hold."""

    size = 8

    def build_validation_data_loader(self) -> Any:
        return DataLoader(Points(self.size), batch_size=2)

    def evaluation_reducer(self) -> Any:
        return {"total": Reducer.SUM, "highest": Reducer.MAX}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        index, _, _ = next(dataloader_iter)
        assert not torch.is_grad_enabled() and not self.engine.module.training
        return {"total": index.sum(), "highest": index.max(), "mean": index.float().mean()}


def test_reducers_by_name() -> None:
    metrics = run_rank(Indices, steps(1)).outcome.final_metrics
    assert metrics == {"total": 28.0, "highest": 7.0, "mean": 3.5, "batches": 1, "epochs": 0}


def test_two_ranks_report_what_one_would(tmp_path: Path) -> None:
    first, second = run_world(2, Indices, steps(1), tmp_path)
    assert (
        first.outcome.final_metrics == second.outcome.final_metrics == run_rank(Indices, steps(1)).outcome.final_metrics
    )
    assert len(first.record.validation) == 1


@pytest.mark.parametrize(("size", "total", "left_out"), [(6, 15, 0), (7, 21, 0), (5, 6, 1)])
def test_what_is_left_over_is_split_and_a_loss_is_said(tmp_path: Path, size: int, total: float, left_out: int) -> None:
    class Uneven(Indices):
        def build_validation_data_loader(self) -> Any:
            return DataLoader(Points(size), batch_size=2)

    first, _ = run_world(2, Uneven, steps(1), tmp_path)
    assert first.outcome.final_metrics["total"] == total
    said = [event["message"] for event in first.record.events if "skipped" in event.get("message", "")]
    assert len(said) == (1 if left_out else 0) and all(f"the last {left_out} samples" in message for message in said)


class Foreign(Indices):
    """Rank r has 2 + 2r samples in batches of 2; rank 0 thus one batch, rank 1 two."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()
        self.evaluations = 0

    def build_validation_data_loader(self) -> Any:
        return TorchDataLoader(Points(2 + 2 * self.context.distributed.rank), batch_size=2)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        self.evaluations += 1
        return super().evaluate_batch(dataloader_iter, batch_idx)


def said(run: Any) -> list[str]:
    return [event["message"] for event in run.record.events if "different numbers" in event.get("message", "")]


def test_other_loaders_with_uneven_batches_count_every_batch_once(tmp_path: Path) -> None:
    """Both ranks evaluate equally often, since a rank may need the other for its collectives."""
    first, second = run_world(2, Foreign, steps(1), tmp_path)
    assert first.trial.evaluations == second.trial.evaluations == 2
    metrics = first.outcome.final_metrics
    assert (metrics["total"], metrics["highest"]) == (0 + 1 + 0 + 1 + 2 + 3, 3)
    assert metrics["mean"] == pytest.approx((0.5 + 0.5 + 2.5) / 3)
    assert len(said(first)) == 1


def test_a_reducer_of_the_trial_counts_no_repetition(tmp_path: Path) -> None:
    class Reduces(Foreign):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.sum = context.wrap_reducer(sum, name="sum", for_training=False)

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            found = super().evaluate_batch(dataloader_iter, batch_idx)
            self.sum.update(float(found["total"]))
            return found

    first, second = run_world(2, Reduces, steps(1), tmp_path)
    assert first.trial.evaluations == second.trial.evaluations == 1
    assert first.outcome.final_metrics["sum"] == first.outcome.final_metrics["total"] == 2
    assert "1 of each are used" in said(first)[0]


def test_a_model_in_evaluation_mode_is_in_training_mode_from_the_first_step_on() -> None:
    class Loaded(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.engine.module.eval()  # as from_pretrained returns it

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            assert self.engine.module.training
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    assert run_rank(Loaded, steps(1)).outcome.step == 1


def test_engines_train_again_afterwards_even_after_an_error() -> None:
    modes: list[bool] = []

    class Fails(LineTrial):
        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            raise ValueError("mine")

        def build_callbacks(self) -> Any:
            from zero_trial.trial import TrialCallback

            class Look(TrialCallback):
                def on_trial_shutdown(inner) -> None:
                    modes.append(self.engine.module.training)

            return {"look": Look()}

    with pytest.raises(ValueError, match="mine"):
        run_rank(Fails, steps(1))
    assert modes == [True]


def test_the_full_dataset_is_seen_by_every_rank_and_rank_0_counts(tmp_path: Path) -> None:
    class Full(LineTrial):
        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            seen = sum(len(batch[0]) for batch in data_loader)
            return {"seen": seen, "by": self.context.distributed.rank}

    for run in run_world(2, Full, steps(1), tmp_path):
        assert run.outcome.final_metrics["seen"] == 8 and run.outcome.final_metrics["by"] == 0


def test_no_validation_without_a_method_for_it() -> None:
    class Without(LineTrial):
        evaluate_batch = LineTrial.__mro__[1].evaluate_batch  # ZeroTrial's own

    run = run_rank(Without, steps(3, validation_period=Batch(1), step_zero_validation=True, metric="validation_loss"))
    assert any("'validation_loss' is never reported" in event.get("message", "") for event in run.record.events)
    assert run.record.validation == [] and run.outcome.step == 3


def test_a_loader_that_yields_nothing() -> None:
    class Empty(Indices):
        size = 0

    with pytest.raises(DataError, match="rank 0: build_validation_data_loader returned an empty loader"):
        run_rank(Empty, steps(1))


def test_a_loader_without_a_length() -> None:
    class Endless(Indices):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.disable_dataset_reproducibility_checks()

        def build_validation_data_loader(self) -> Any:
            return iter([1])

    with pytest.raises(DataError, match="a loader without a length"):
        run_rank(Endless, steps(1))


def test_a_method_that_takes_more_than_one_batch() -> None:
    class Greedy(Indices):
        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            next(dataloader_iter)
            next(dataloader_iter)
            return {"m": 1.0}

    with pytest.raises(DataError, match="evaluate_batch consumed more batches than exist"):
        run_rank(Greedy, steps(1))


class Pipelined(FakeEngine):
    """An engine that does all micro-batches in one call."""

    is_pipe_parallel = True


class UnderPipeline(Indices):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.engine.__class__ = Pipelined

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return [super(UnderPipeline, self).train_batch(dataloader_iter, epoch_idx, batch_idx) for _ in range(3)][-1]


def test_under_a_pipeline_batches_come_in_groups_and_a_rest_is_said() -> None:
    run = run_rank(UnderPipeline, steps(2), ds_config={"gradient_accumulation_steps": 3})
    assert run.trial.engine.global_steps == 2
    # one group: the first of four batches starts it
    assert run.outcome.final_metrics["highest"] == 1
    assert any("the last 1 batches are skipped" in event.get("message", "") for event in run.record.events)


def test_under_a_pipeline_the_loader_must_fill_one_group() -> None:
    class Short(UnderPipeline):
        size = 4

    with pytest.raises(ConfigError, match=r"expected at least gradient_accumulation_steps = 3"):
        run_rank(Short, steps(1), ds_config={"gradient_accumulation_steps": 3})


def test_no_more_batches_than_asked_for() -> None:
    trial = run_rank(Indices, steps(1)).trial
    validator = Validator(trial, trial.context, [], most=1)
    assert validator.batches == 4 and validator.run()["highest"] == 1
    assert Validator(trial, trial.context, [], most=9).run()["highest"] == 7


_NUMBERS = count()


def method(body: str, decorator: str = "") -> Callable[..., Any]:
    """``body`` as a method of a class, with a source that can be found."""
    text = (
        f"class Trial:\n    {decorator or 'x = 0'}\n    def evaluate(self, batch):\n{textwrap.indent(body, ' ' * 8)}\n"
    )
    name, made = f"<stated metrics {next(_NUMBERS)}>", dict[str, Any](torch=torch, wrapped=lambda function: function)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), made)
    found: Callable[..., Any] = made["Trial"].evaluate
    return found


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ('return {"loss": 1, "accuracy": batch}', {"loss", "accuracy"}),
        ("return dict(loss=1, accuracy=2)", {"loss", "accuracy"}),
        ('if batch:\n    return {"a": 1}\nreturn {"b": 1} | dict(c=1)', {"a", "b", "c"}),
        ('return {"a": 1} if batch else {}', {"a"}),
        ("return {}", set()),
        ('def inner():\n    return 3\nf = lambda: 4\nreturn {"a": inner()}', {"a"}),
        *((text, None) for text in (
            "return batch",
            "return self.evaluate(batch)",
            'return {**batch, "a": 1}',
            "return {batch: 1}",
            "return dict(batch)",
            "return dict(**batch)",
            'm = {"a": 1}\nm.update(batch)\nreturn m',
            'if batch:\n    return {"a": 1}\nreturn batch',
            'yield {"a": 1}',
            "raise NotImplementedError",
        )),
    ],
)  # fmt: skip
def test_which_metrics_a_method_reports(body: str, names: set[str] | None):
    assert reported_metrics(method(body)) == names
    if names == {"a"}:
        assert reported_metrics(method(body, "@torch.no_grad()")) == names
        assert reported_metrics(method(body, "@wrapped")) is None
        made: dict[str, Any] = {}
        exec("def evaluate():\n    return {'a': 1}\n", made)  # without a source
        assert reported_metrics(len) is None and reported_metrics(made["evaluate"]) is None
