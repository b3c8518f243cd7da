"""Events of a run as they reach the monitor."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.late import make_late
from tests.support.models import TinyLM, make_engine, train_engine
from zero_trial.engine.monitors import Event, Monitor
from zero_trial.engine.observe import Observer, StepEvents


class Memory:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, events: Sequence[Event]) -> None:
        self.events += events

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def of(self, name: str) -> list[tuple[float, int]]:
        return [(value, step) for event, value, step in self.events if event == f"Train/Samples/{name}"]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


def watched(scaled: bool = False, **config: Any) -> tuple[zero_trial.Engine, Memory]:
    defaults = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine = zero_trial.initialize(model=Mean(), config=defaults | config)[0]
    memory = Memory()
    monitor = Monitor([memory])
    engine.observer = Observer(monitor, events=StepEvents(monitor, scaled=scaled))
    return engine, memory


def train(engine: zero_trial.Engine, *values: float) -> list[float]:
    losses = []
    for value in values:
        loss = engine(torch.full((2,), value))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_loss_and_learning_rate_against_samples():
    engine, memory = watched()
    losses = train(engine, 1.0, 3.0)
    assert memory.of("train_loss") == [(pytest.approx(losses[0]), 2), (pytest.approx(losses[1]), 4)]
    assert memory.of("lr") == [(0.5, 2), (0.5, 4)]
    assert memory.of("loss_scale") == [] and memory.of("eval_loss") == []


def test_the_loss_is_the_mean_of_a_steps_micro_batches():
    engine, memory = watched(gradient_accumulation_steps=2)
    losses = train(engine, 1.0, 3.0, 5.0, 5.0)
    assert memory.of("train_loss") == [
        (pytest.approx(sum(losses[:2]) / 2), 4),
        (pytest.approx(sum(losses[2:]) / 2), 8),
    ]


def test_the_loss_scale_where_there_is_one():
    engine, memory = watched(
        scaled=True, torch_autocast={"enabled": True, "dtype": "fp16"}, fp16={"initial_scale_power": 3}
    )
    train(engine, 1.0)
    assert memory.of("loss_scale") == [(8.0, 2)]


def test_an_evaluation_is_one_event_when_training_goes_on():
    engine, memory = watched()
    train(engine, 0.0)
    engine.eval()
    with torch.no_grad():
        values = [engine(torch.full((2,), value)).item() for value in (1.0, 4.0)]
    assert memory.of("eval_loss") == []
    engine.train()
    train(engine, 0.0)
    assert memory.of("eval_loss") == [(pytest.approx(sum(values) / 2), 2)]


def test_the_last_evaluation_is_written_at_the_end():
    engine, memory = watched()
    engine.eval()
    engine(torch.ones(2))
    engine.destroy()
    engine.destroy()
    assert len(memory.of("eval_loss")) == 1


def test_outputs_that_are_no_loss_are_not_taken_for_one():
    engine, memory = watched()
    engine.module.forward = lambda x: x * 2  # type: ignore[method-assign]
    engine.eval()
    engine(torch.ones(2))
    engine.destroy()
    assert memory.events == []


# --- a step that the device decides ---------------------------------------------------------------------------------------


def late(**config: Any) -> tuple[zero_trial.Engine, Memory]:
    fused = {"type": "SGD", "params": {"lr": 0.5, "fused": True}}
    engine, memory = watched(optimizer=fused, scheduler={"type": "ExponentialLR", "params": {"gamma": 0.5}}, **config)
    make_late(engine)
    return engine, memory


def test_the_events_of_a_late_step_come_with_the_next_one():
    """The same events as from a step that the host decides, one skipped step among them."""
    engine, memory = late()
    losses = []
    for number, value in enumerate((1.0, float("inf"), 3.0)):
        losses += train(engine, value)
        assert len(memory.of("train_loss")) == number
        assert engine.outcome.open
    engine.destroy()
    samples = [2, 4, 6]
    assert memory.of("train_loss") == list(zip(losses, samples, strict=True))
    assert memory.of("lr") == [(0.25, 2), (0.25, 4), (0.125, 6)]


def test_the_events_of_a_late_step_come_before_its_evaluation():
    engine, memory = late()
    train(engine, 1.0)
    engine.eval()
    engine(torch.ones(2))
    engine.train()
    train(engine, 1.0)
    engine.destroy()
    names = [name.rpartition("/")[2] for name, _, _ in memory.events]
    assert names == ["train_loss", "lr", "eval_loss", "train_loss", "lr"]


@pytest.mark.parametrize("gone", [False, True])
def test_the_end_of_the_interpreter_writes_what_is_due(gone: bool) -> None:
    """An engine is there then as a rule; if it is not, its rate is not known, but the loss is."""
    engine, memory = late()
    losses = train(engine, 1.0)
    events = engine.observer.events
    assert events is not None and memory.events == []
    if gone:
        assert events._due is not None
        events._due.engine = lambda: None
    events.close()
    assert memory.of("train_loss") == [(losses[0], 2)]
    assert memory.of("lr") == ([] if gone else [(0.25, 2)])


def test_an_engine_that_is_dropped_writes_what_is_due(tmp_path: Path) -> None:
    engine = make_engine(TinyLM, {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    engine.outcome.deferred = True
    train_engine(engine, range(1))
    del engine
    gc.collect()
    assert len((tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()) == 2


def test_a_late_step_is_not_overwritten_by_the_next_one():
    """A step after another engine's loss: no backward pass of this engine's has asked for the outcome of the step before."""
    engine, memory = late()
    for value in (1.0, 2.0):
        engine(torch.full((2,), value)).backward()
        engine.step()
    engine.destroy()
    assert memory.of("lr") == [(0.25, 2), (0.125, 4)]
