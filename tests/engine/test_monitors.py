"""Monitor events of a run and their writers: TensorBoard, Weights & Biases, Comet and CSV files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

import zero_trial
from zero_trial.ds_config.keys_running import CometSection, WandbSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.monitors import (
    Event,
    Monitor,
    Writer,
    build_writers,
    comet_writer,
    csv_writer,
    folder_of,
    require,
    tensorboard_writer,
    wandb_writer,
)
from zero_trial.engine.observe import StepEvents
from zero_trial.errors import ConfigError


def recording(calls: list[object]) -> Writer:
    """A writer that records what it is asked for."""
    return Writer(lambda *event: calls.append(event), lambda: calls.append("flush"), lambda: calls.append("close"))


def test_every_writer_gets_every_event():
    first: list[object] = []
    second: list[object] = []
    monitor = Monitor([recording(first), recording(second)])
    monitor.write_events([("a", 1.0, 8)])
    monitor.write_events([("b", 2.0, 16)], flush=False)
    monitor.close()
    assert first == second == [("a", 1.0, 8), "flush", ("b", 2.0, 16), "close"]
    assert not monitor.enabled


def test_only_rank_0_writes(tmp_path: Path):
    config = read_ds_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    assert build_writers(config, 1) == []
    assert not (tmp_path / "job").exists()
    assert len(build_writers(config, 0)) == 1
    assert (tmp_path / "job").is_dir()


@pytest.mark.parametrize(
    ("section", "package"), [("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard", "tensorboard")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_an_error_on_every_rank(
    section: str, package: str, rank: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("zero_trial.engine.monitors.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        build_writers(read_ds_config({section: {"enabled": True}}), rank)
    advice = f"Run: pip install {package}; or set {section}.enabled to false."
    assert str(error.value) == f"{section}.enabled: the package {package} is not installed. {advice}"


def test_folders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/nowhere")
    assert folder_of("", "tensorboard", "job") == Path("tensorboard/job")
    assert folder_of("~/logs", "tensorboard", "job") == Path("/nowhere/logs/job")


def test_a_stand_in_without_a_spec_is_not_taken_for_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "half_a_package", ModuleType("half_a_package"))
    with pytest.raises(ConfigError, match="half_a_package is not installed"):
        require("half_a_package", "wandb")


def test_one_file_per_name_that_a_resumed_run_continues(tmp_path: Path):
    csv_writer(tmp_path / "job").write("Train/Samples/lr", 0.1, 8)
    writer = csv_writer(tmp_path / "job")
    writer.write("Train/Samples/train_loss", 2.5, 8)
    writer.write("Train/Samples/lr", 0.05, 16)
    lr = (tmp_path / "job" / "Train_Samples_lr.csv").read_text()
    assert lr.splitlines() == ["step,lr", "8,0.1", "16,0.05"]
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines() == ["step,train_loss", "8,2.5"]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: the folder could not be created"):
        csv_writer(tmp_path / "taken" / "job")


def test_what_is_written_can_be_read(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tensorboard_writer(tmp_path / "job")
    board.write("Train/Samples/train_loss", 2.5, 8)
    board.write("Train/Samples/train_loss", 2.0, 16)
    board.flush()
    board.close()
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("Train/Samples/train_loss")] == [(8, 2.5), (16, 2.0)]


def stand_in(monkeypatch: pytest.MonkeyPatch, package: str, function: str) -> Mock:
    """Put a package with one function into the place of a real one; return that function."""
    module = ModuleType(package)
    made = Mock()
    setattr(module, function, made)
    monkeypatch.setitem(sys.modules, package, module)
    return made


def test_the_section_and_the_events_arrive(monkeypatch: pytest.MonkeyPatch):
    init = stand_in(monkeypatch, "wandb", "init")
    writer = wandb_writer(WandbSection(enabled=True, group="g", team="t", project="p"))
    writer.write("a", 1.0, 8)
    writer.write("b", 2.5, 8)
    writer.flush()
    writer.close()
    assert init.call_args.kwargs == {"project": "p", "group": "g", "entity": "t"}
    run = init.return_value
    assert run.mock_calls == [call.log({"a": 1.0}, step=8), call.log({"b": 2.5}, step=8), call.finish()]


def test_what_the_section_says_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    start = stand_in(monkeypatch, "comet_ml", "start")
    given = {
        "project": "p",
        "workspace": "w",
        "api_key": "k",
        "experiment_key": "e",
        "online": False,
        "mode": "get",
    }
    comet_writer(CometSection(enabled=True, experiment_name="n", **given)).close()
    assert start.call_args.kwargs == given
    assert start.return_value.mock_calls == [call.set_name("n"), call.end()]


def test_the_interval_is_per_name(monkeypatch: pytest.MonkeyPatch):
    start = stand_in(monkeypatch, "comet_ml", "start")
    writer = comet_writer(CometSection(enabled=True, samples_log_interval=10))
    assert start.call_args.kwargs == {}  # what is not set is left to comet
    for samples in (4, 8, 12, 14, 20, 24):
        writer.write("a", float(samples), samples)
    writer.write("b", 1.0, 24)
    sent = [("a", 4.0, 4), ("a", 14.0, 14), ("a", 24.0, 24), ("b", 1.0, 24)]
    assert start.return_value.mock_calls == [call.log_metric(name, value, step=step) for name, value, step in sent]


class EventMemory:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def of(self, name: str) -> list[tuple[float, int]]:
        return [(value, step) for event, value, step in self.events if event == f"Train/Samples/{name}"]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


def watched(**config: Any) -> tuple[zero_trial.Engine, EventMemory]:
    defaults = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine = zero_trial.initialize(model=Mean(), config=defaults | config)[0]
    memory = EventMemory()
    monitor = Monitor([Writer(lambda *event: memory.events.append(event))])
    engine.observer.monitor, engine.observer.events = monitor, StepEvents(monitor, scaled=False)
    return engine, memory


def train(engine: zero_trial.Engine, *values: float) -> list[float]:
    losses = []
    for value in values:
        loss = engine(torch.full((2,), value))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_the_loss_is_the_mean_of_a_steps_micro_batches():
    engine, memory = watched(gradient_accumulation_steps=2)
    losses = train(engine, 1.0, 3.0, 5.0, 5.0)
    assert memory.of("train_loss") == [
        (pytest.approx(sum(losses[:2]) / 2), 4),
        (pytest.approx(sum(losses[2:]) / 2), 8),
    ]
    assert memory.of("loss_scale") == [] and memory.of("eval_loss") == []


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
