"""One optimizer step, its accumulation, and the score by which checkpoints are compared."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.errors import ConfigError, TrialError
from zero_trial.trial.controller import Score, watch_skips
from zero_trial.trial.trial import fitted

TWICE = {"gradient_accumulation_steps": 2}


def test_train_batch_is_called_once_per_micro_batch_with_the_same_index() -> None:
    run = run_rank(LineTrial, steps(3), ds_config=TWICE)
    assert run.trial.calls == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2)]
    [(_, metrics)] = run.record.training
    assert metrics["loss"] == pytest.approx(sum(run.trial.losses) / 6, rel=1e-6)
    assert run.trial.engine.global_steps == 3


class Manual(LineTrial):
    """Does all micro-batches in one call."""

    micro = 2

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return [super(Manual, self).train_batch(dataloader_iter, epoch_idx, batch_idx) for _ in range(self.micro)][-1]


def test_manual_accumulation() -> None:
    run = run_rank(Manual, steps(2), ds_config=TWICE)
    assert run.trial.engine.global_steps == 2 and len(run.trial.seen) == 4


def test_a_step_that_does_too_few_micro_batches() -> None:
    class TooFew(Manual):
        micro = 1

    with pytest.raises(
        TrialError, match="did not train for gradient accumulation steps: got 1 micro-batches, expected a multiple of 2"
    ):
        run_rank(TooFew, steps(2), ds_config=TWICE)


def test_a_step_without_an_engine_step() -> None:
    class Forgets(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            _, x, y = next(dataloader_iter)
            return ((self.engine(x) - y) ** 2).mean()

    with pytest.raises(TrialError, match="rank 0, step 1: train_batch did not train: no engine has made a step"):
        run_rank(Forgets, steps(2))


@pytest.mark.parametrize("returned", ["loss", None, [1.0]])
def test_wrong_types(returned: Any) -> None:
    class Wrong(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return returned

    with pytest.raises(TrialError, match="must return a dictionary mapping string names to Tensor metrics"):
        run_rank(Wrong, steps(1))


def test_methods_get_the_arguments_that_they_take() -> None:
    assert fitted(lambda a: [a])(1, 2, 3) == [1]
    assert fitted(lambda a, b, c: [a, b, c])(1, 2, 3) == [1, 2, 3]
    assert fitted(lambda *rest: list(rest))(1, 2, 3) == [1, 2, 3]


class Counting:
    """An engine that says how often it was asked."""

    def __init__(self) -> None:
        self.global_steps, self.skipped_steps, self.asked = 0, 0, 0
        self.skipped: set[int] = set()

    def step(self, *, skip: bool = False) -> None:
        if skip:
            self.skipped.add(self.global_steps)
            self.skipped_steps += 1
        self.global_steps += 1


class Numbering(Counting):
    def skipped_between(self, first: int, end: int) -> int:
        self.asked += 1
        return len(self.skipped & set(range(first, end)))


@pytest.mark.parametrize("kind", [Counting, Numbering])
def test_whether_a_step_was_skipped_can_be_asked_later(kind: type[Counting]) -> None:
    """A trial's step may be several of an engine; what later ones do does not change the answer."""
    engine, answers = kind(), []
    for skips in ((False, False), (False, True), (True,), (False,), ()):
        after = watch_skips(engine)
        for skip in skips:
            engine.step(skip=skip)
        answers.append(after())
    assert engine.asked == 0
    assert [answer() for answer in answers] == [False, True, True, False, False]
    assert engine.asked == (5 if kind is Numbering else 0)


@pytest.mark.parametrize(
    ("value", "best", "smaller", "larger"),
    [
        (1.0, 2.0, True, False),
        (2.0, 1.0, False, True),
        (1.0, 1.0, False, False),
        (1.0, None, True, True),
        (1.0, math.nan, True, True),
        (math.nan, 1.0, False, False),
        (math.nan, None, False, False),
    ],
)
def test_which_is_better(value: float, best: float | None, smaller: bool, larger: bool) -> None:
    assert Score("m", True).is_better(value, best) is smaller
    assert Score("m", False).is_better(value, best) is larger


def test_its_value_among_the_metrics() -> None:
    assert Score("loss").of({"loss": 2, "batches": 5}) == 2.0
    assert Score(None).of({}) is None
    for metrics, message in (
        ({"accuracy": 1.0}, r"never reported: got the trial reports \['accuracy'\]"),
        ({"loss": [1.0]}, r"got values of shape \(1,\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            Score("loss").of({**metrics, "batches": 5, "epochs": 0})
