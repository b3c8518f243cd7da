"""Engines that stand in for others while a trial is planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.preflight.measured import ROWS, batch, build, ds_config
from zero_trial.errors import ConfigError, TrialError
from zero_trial.preflight.compare import Planner, memory_plan
from zero_trial.preflight.proxy_engine import TrialSubject


def planned(subject: TrialSubject, train: Any, *batches: Any, **more: Any) -> Any:
    subject.perform(train, batches, **more)
    return Planner(subject, subject.settings, subject.ranks)


def test_a_trial_is_planned_like_its_model() -> None:
    subject = TrialSubject(2)
    engine = subject.factory(model=build("gpt"), config=ds_config(2))[0]
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size(), engine.world_size) == (
        ROWS,
        2 * ROWS,
        2,
    )

    def train_batch(batches: Iterator[Any]) -> None:
        engine.backward(engine(*next(batches)))
        engine.step()

    planner = planned(subject, train_batch, batch())
    assert planner.plan() == memory_plan(build("gpt"), ds_config(2), 2, batch())
    rows = planner.compare()
    assert [row.plan is None for row in rows] == [False] * 7
    away = rows[-1].plan
    assert away is not None and away.figures.optimizer < planner.plan().figures.optimizer / 2


def test_two_engines_are_planned_together() -> None:
    subject = TrialSubject(2)
    one = subject.factory(model=build("gpt"), config=ds_config(1))[0]
    two = subject.factory(model=build("gpt"), config=ds_config(1))[0]

    def train_batch(batches: Iterator[Any]) -> None:
        given = next(batches)
        for engine in (one, two):
            engine.backward(engine(*given))
            engine.step()

    both, single = planned(subject, train_batch, batch()).plan(), memory_plan(build("gpt"), ds_config(1), 2, batch())
    assert both.figures.states == 2 * single.figures.states and both.parameter_count == 2 * single.parameter_count
    assert both.figures.peak > single.figures.peak + single.figures.states * 0.9


def test_a_trial_that_does_its_own_accumulation() -> None:
    subject = TrialSubject(2)
    engine = subject.factory(model=build("gpt"), config=ds_config(1, accumulation=3))[0]
    calls = []

    def train_batch(batches: Iterator[Any]) -> None:
        calls.append(engine.gradient_accumulation_steps())
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*next(batches)))
            engine.step()

    assert engine.gradient_accumulation_steps() == 3
    plan = planned(subject, train_batch, batch(), calls_per_step=1).plan()
    assert calls == [2, 2] and plan.accumulation == 3  # a third micro-batch needs nothing that the second does not


def test_client_optimizers_and_generators_of_parameters() -> None:
    model = build("gpt")
    config = ds_config(1)
    del config["optimizer"]
    subject = TrialSubject(2)
    engine, optimizer, _, _ = subject.factory(
        model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert optimizer is not None and engine.get_lr() == [0.1]

    def train_batch(batches: Iterator[Any]) -> None:
        engine.backward(engine(*next(batches)))
        engine.step()

    assert planned(subject, train_batch, batch()).plan().figures.optimizer == 0  # SGD without momentum keeps nothing
    other = TrialSubject(2)
    other.factory(model=build("gpt"), config=ds_config(1), model_parameters=iter([]))


def test_faults() -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        TrialSubject(2).factory(config=ds_config(1))
    with pytest.raises(TrialError, match="the trial made no engine"):
        _ = TrialSubject(2).settings
