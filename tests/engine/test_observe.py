"""What rank 0 observes: phases, periodic lines, the state at the start, trace ranges, and the pause
of the cycle collector."""

from __future__ import annotations

import gc
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.ds_config.keys_running import MONITORS
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.observe import (
    Event,
    Monitor,
    StepEvents,
    Writer,
    build_writers,
    csv_writer,
    describe_state,
    tensorboard_writer,
)
from zero_trial.errors import ConfigError


def lines(config: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is printed in ``steps`` steps."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "zero_trial"):
        train_engine(make_engine(TinyLM, config), range(steps))
    return [record.getMessage() for record in caplog.records]


def test_steps_per_print_and_throughput(caplog: pytest.LogCaptureFixture):
    printed = lines({"steps_per_print": 2}, 5, caplog)
    assert [line.split()[0] for line in printed] == ["step=2", "step=4"]
    assert all(" samples/s=" in line for line in printed)
    without = lines({"steps_per_print": 2, "timers": {"throughput": {"enabled": False}}}, 2, caplog)
    assert len(without) == 1 and "samples/s" not in without[0]


def test_mfu_is_in_each_line_once_operations_are_counted(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """A step of 8 samples is two micro-batches of 4."""
    profiler = {"enabled": True, "output_file": str(tmp_path / "flops.txt"), "recompute_fwd_factor": 0.5}
    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    engine = make_engine(TinyLM, {"steps_per_print": 1, "flops_profiler": profiler, **batch})
    assert engine.get_mfu(100.0) is None
    with caplog.at_level(logging.INFO, "zero_trial"):
        train_engine(engine, range(4))
    printed = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step=")]
    assert [" mfu=" in line for line in printed] == [False, True, True, True]
    profile = engine.observer.profiler.profile
    flops = 0.5 * profile.forward_flops + profile.backward_flops
    assert engine.get_mfu(100.0) == pytest.approx(25 * flops / profile.peak.per_second)


def test_wall_clock_breakdown(caplog: pytest.LogCaptureFixture):
    config = {"steps_per_print": 1, "wall_clock_breakdown": True, "gradient_accumulation_steps": 2}
    printed = [line for line in lines(config, 2, caplog) if line.startswith("ms per step: ")]
    assert len(printed) == 2
    parts = [part.rsplit(" ", 1) for part in printed[1].removeprefix("ms per step: ").split(" | ")]
    assert [name for name, _ in parts] == ["forward", "backward", "reduce wait", "step", "other"]
    assert all(float(value) >= 0 for _, value in parts) and float(parts[0][1]) > 0
    assert not [line for line in lines({"steps_per_print": 1}, 1, caplog) if line.startswith("ms per step")]


def test_monitors_get_the_events_of_a_run(tmp_path: Path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 5}}
    engine = make_engine(TinyLM, monitor | autocast)
    losses = train_engine(engine, range(3))
    engine.monitor.write_events([("Mine/accuracy", 0.5, engine.global_samples)])
    read = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in read] == ["step", "8", "16", "24"]
    assert [float(line.split(",")[1]) for line in read[1:]] == pytest.approx(losses)
    assert (tmp_path / "job" / "Train_Samples_lr.csv").exists()
    scales = (tmp_path / "job" / "Train_Samples_loss_scale.csv").read_text().splitlines()
    assert scales[:2] == ["step,loss_scale", "8,32.0"]
    assert (tmp_path / "job" / "Mine_accuracy.csv").read_text().splitlines() == ["step,accuracy", "24,0.5"]
    engine.destroy()
    assert not engine.monitor.enabled


@pytest.mark.parametrize("destroyed", [True, False])
def test_disable_python_gc(destroyed: bool):
    was = gc.isenabled()
    gc.enable()
    try:
        engine, other = (make_engine(TinyLM, {"disable_python_gc": True}) for _ in range(2))
        assert not gc.isenabled()
        other.destroy()
        assert not gc.isenabled()
        if destroyed:
            engine.destroy()
        del engine
        gc.collect()
        assert gc.isenabled()
        make_engine(TinyLM, {})
        assert gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()


def on_two_ranks(logger: dict[str, Any]) -> tuple[list[str], dict[str, dict[str, int]], bool]:
    """Printed lines, the summary, and whether this rank reports at all."""
    printed: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: printed.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_trial").addHandler(handler)
    # the ranks of the pool live on from test to test
    logging.getLogger("zero_trial").setLevel(logging.INFO)
    try:
        engine = make_engine(TinyLM, {"zero_optimization": {"stage": 2}, "steps_per_print": 1, "comms_logger": logger})
        train_engine(engine, range(1))
    finally:
        logging.getLogger("zero_trial").removeHandler(handler)
    return printed, engine.comms_summary(), engine.observer.lines is not None


def test_comms_logger(ranks: Pools):
    first, second = ranks(2).run(on_two_ranks, {"enabled": True})
    assert second[0] == [] and not second[2]
    printed, summary, _ = first
    table = next(line for line in printed if line.startswith("communication"))
    scatter = summary["reduce_scatter/shard"]
    assert scatter["bytes"] == 4 * scatter["elements"] > 0
    assert f"{scatter['bytes']:,}" in table and "all_gather/shard" in table
    off = ranks(2).run(on_two_ranks, {"enabled": False})[0][0]
    assert not [line for line in off if line.startswith("communication")]
    some = {"enabled": True, "prof_all": False, "prof_ops": ["all_gather"]}
    printed, summary, _ = ranks(2).run(on_two_ranks, some)[0]
    assert summary and all(name.startswith("all_gather/") for name in summary)
    assert "reduce_scatter" not in "".join(printed)


def test_the_description_shows_no_secrets():
    engine = make_engine(TinyLM, {"bf16": {"enabled": True}, "comet": {"api_key": "topsecret"}})
    text = describe_state(engine.config, engine.resolved, engine.mesh, engine.sharded.groups)
    assert "topsecret" not in text and "(not shown)" in text and "batch: 8 = 8 x 1 x 1 ranks" in text
    assert "parameters bfloat16, gradients bfloat16, wire bfloat16, masters float32, buffers bfloat16" in text


@pytest.mark.parametrize(
    ("section", "package"),
    [(name, "comet_ml" if name == "comet" else name) for name in MONITORS if name != "csv_monitor"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_an_error_on_every_rank(
    section: str, package: str, rank: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("zero_trial.engine.observe.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        build_writers(read_ds_config({section: {"enabled": True}}), rank)
    advice = f"Run: pip install {package}; or set {section}.enabled to false."
    assert str(error.value) == f"{section}.enabled: the package {package} is not installed. {advice}"


def test_one_file_per_name_that_a_resumed_run_continues(tmp_path: Path):
    csv_writer(tmp_path / "job").write("Train/Samples/lr", 0.1, 8)
    writer = csv_writer(tmp_path / "job")
    writer.write("Train/Samples/train_loss", 2.5, 8)
    writer.write("Train/Samples/lr", 0.05, 16)
    lr = (tmp_path / "job" / "Train_Samples_lr.csv").read_text()
    assert lr.splitlines() == ["step,lr", "8,0.1", "16,0.05"]
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines() == ["step,train_loss", "8,2.5"]


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
    module.__spec__ = ModuleSpec(package, None)
    made = Mock()
    setattr(module, function, made)
    monkeypatch.setitem(sys.modules, package, module)
    return made


@pytest.mark.parametrize(
    ("package", "section", "options"),
    [
        ("wandb", {"group": "g", "team": "t", "project": "p"}, {"project": "p", "group": "g", "entity": "t"}),
        ("trackio", {"project": "p", "space_id": "me/s"}, {"project": "p", "name": None, "space_id": "me/s"}),
    ],
)
def test_the_section_and_the_events_arrive(
    monkeypatch: pytest.MonkeyPatch, package: str, section: dict[str, Any], options: dict[str, Any]
):
    init = stand_in(monkeypatch, package, "init")
    (writer,) = build_writers(read_ds_config({package: {"enabled": True, **section}}), rank=0)
    writer.write("a", 1.0, 8)
    writer.write("b", 2.5, 8)
    writer.flush()
    writer.close()
    assert init.call_args.kwargs == options
    run = init.return_value
    assert run.mock_calls == [call.log({"a": 1.0}, step=8), call.log({"b": 2.5}, step=8), call.finish()]


class MlflowClient:
    """The methods of MLflow's client that its section uses, with its signatures and its errors."""

    experiments: ClassVar[dict[str, str]] = {}
    runs: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        self.tracking_uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return SimpleNamespace(experiment_id=known, name=name) if known is not None else None

    def create_experiment(self, name: str) -> str:
        if name in self.experiments:
            raise ValueError(f"RESOURCE_ALREADY_EXISTS: Experiment '{name}' already exists.")
        return self.experiments.setdefault(name, str(len(self.experiments) + 1))

    def create_run(self, experiment_id: str, *, run_name: str | None = None) -> Any:
        assert experiment_id in self.experiments.values()
        self.runs.append({"name": run_name, "uri": self.tracking_uri, "metrics": [], "status": "RUNNING"})
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs) - 1)))

    def log_metric(self, run_id: str, key: str, value: float, *, step: int | None = None) -> None:
        run = self.runs[int(run_id)]
        assert run["status"] == "RUNNING"
        run["metrics"].append((key, value, step))

    def set_terminated(self, run_id: str) -> None:
        self.runs[int(run_id)]["status"] = "FINISHED"


def test_runs_of_mlflow_share_an_experiment(monkeypatch: pytest.MonkeyPatch):
    stand_in(monkeypatch, "mlflow", "log_metric")  # of the active run, which is the script's own
    monkeypatch.setattr(sys.modules["mlflow"], "MlflowClient", MlflowClient, raising=False)
    section = {"enabled": True, "tracking_uri": "http://here:5000", "experiment_name": "gpt", "run_name": "first"}
    losses = []
    for _ in range(2):
        engine = make_engine(TinyLM, {"mlflow": section})
        losses.append(train_engine(engine, range(2)))
        engine.destroy()
    assert list(MlflowClient.experiments) == ["gpt"] and len(MlflowClient.runs) == 2
    for run, expected in zip(MlflowClient.runs, losses, strict=True):
        assert (run["name"], run["uri"], run["status"]) == ("first", "http://here:5000", "FINISHED")
        found = [(value, step) for name, value, step in run["metrics"] if name == "Train/Samples/train_loss"]
        assert found == [(pytest.approx(expected[0]), 8), (pytest.approx(expected[1]), 16)]


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
    assert memory.of("train_loss") == [(pytest.approx(sum(losses[:2]) / 2), 4), (pytest.approx(sum(losses[2:]) / 2), 8)]
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


@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_an_error_of_memory_that_ran_out_has_a_table_of_groups(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    if what == "step":
        monkeypatch.setattr(engine.outcome, "apply", fail)
    elif what == "backward":
        engine.module.norm.weight.register_hook(fail)
    else:
        engine.module.norm.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train_engine(engine, range(1))
    notes = getattr(error.value, "__notes__", [])  # on Python 3.10 in the message
    _, first, heads, *rows = "\n".join([str(error.value), *notes]).splitlines()
    assert first.startswith("rank 0: memory: parameters ") and heads.startswith("group")
    assert len(rows) == min(len(engine.sharded.groups), 10)
