"""What rank 0 observes: phases, periodic lines, the state at the start, trace ranges, and the pause
of the cycle collector."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zero_trial
from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.engine.observe import describe_state


def lines(config: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is printed in ``steps`` steps."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "zero_trial"):
        train_engine(make_engine(TinyLM, config), range(steps))
    return [record.getMessage() for record in caplog.records]


def test_nothing_is_watched_unless_asked():
    engine = make_engine(TinyLM, {})
    assert vars(engine.observer) == dict.fromkeys(vars(engine.observer)) | {"monitor": engine.monitor}
    assert not engine.monitor.enabled


def test_steps_per_print_and_throughput(caplog: pytest.LogCaptureFixture):
    printed = lines({"steps_per_print": 2}, 5, caplog)
    assert [line.split()[0] for line in printed] == ["step=2", "step=4"]
    assert all(" samples/s=" in line for line in printed)
    without = lines({"steps_per_print": 2, "timers": {"throughput": {"enabled": False}}}, 2, caplog)
    assert len(without) == 1 and "samples/s" not in without[0]


def test_a_resumed_run_counts_its_own_samples(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    times = iter([0.0, 4.0, 5.0])
    monkeypatch.setattr("zero_trial.engine.observe.time", SimpleNamespace(perf_counter=lambda: next(times)))
    engine = make_engine(TinyLM, {"steps_per_print": 2})
    engine.global_steps, engine.global_samples = 98, 98 * 8
    with caplog.at_level(logging.INFO, "zero_trial"):
        train_engine(engine, range(5))
    printed = [message for message in caplog.messages if message.startswith("step=")]
    assert [line.split()[-1] for line in printed] == ["samples/s=4.0", "samples/s=16.0"]


def test_wall_clock_breakdown(caplog: pytest.LogCaptureFixture):
    config = {"steps_per_print": 1, "wall_clock_breakdown": True, "gradient_accumulation_steps": 2}
    printed = [line for line in lines(config, 2, caplog) if line.startswith("ms per step: ")]
    assert len(printed) == 2
    parts = [part.rsplit(" ", 1) for part in printed[1].removeprefix("ms per step: ").split(" | ")]
    assert [name for name, _ in parts] == ["forward", "backward", "reduce wait", "step", "other"]
    assert all(float(value) >= 0 for _, value in parts) and float(parts[0][1]) > 0
    assert not [line for line in lines({"steps_per_print": 1}, 1, caplog) if line.startswith("ms per step")]


def test_details_without_steps_per_print_come_every_ten_steps(caplog: pytest.LogCaptureFixture):
    printed = lines({"memory_breakdown": True}, 11, caplog)
    assert len(printed) == 1 and printed[0].startswith("memory: parameters 0.2 MiB")
    assert lines({"memory_breakdown": False}, 11, caplog) == []


def test_dump_state(caplog: pytest.LogCaptureFixture):
    assert lines({"dump_state": True}, 0, caplog)[0].startswith("configuration:\ntrain_batch_size ")
    assert lines({}, 0, caplog) == []


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


def test_configuration_and_units():
    zero = {"stage": 3, "param_persistence_threshold": 0}
    settings = {"bf16": {"enabled": True}, "gradient_clipping": 0.5, "comet": {"api_key": "topsecret"}}
    engine = make_engine(TinyLM, {"zero_optimization": zero} | settings)
    text = describe_state(engine.config, engine.resolved, engine.mesh, engine.sharded.groups)
    assert "gradient_clipping " in text and "scheduler" not in text
    assert "zero_optimization.reduce_bucket_size" in text  # defaults too
    assert "topsecret" not in text and "(not shown)" in text
    assert "batch: 8 = 8 x 1 x 1 ranks" in text
    assert "parameters bfloat16, gradients bfloat16, wire bfloat16, masters float32, buffers bfloat16" in text
    rows = text.splitlines()[-1 - len(engine.sharded.groups) :]
    assert rows[0].split() == ["group", "parameters", "elements", "shard", "dtype", "lives"]
    assert sum(int(row.split()[2].replace(",", "")) for row in rows[1:]) >= sum(
        p.numel() for p in engine.module.parameters()
    )


def ranges_of_a_step(stage: int) -> set[str]:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    engine, *_ = zero_trial.initialize(model=model, config=config)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    engine.destroy()
    return {
        event.key.removeprefix("zero_trial.") for event in trace.key_averages() if event.key.startswith("zero_trial.")
    }


def test_each_phase_has_a_range(ranks: Pools):
    phases = {"forward", "backward", "step", "norm", "update", "reduce", "publish"}
    for stage in (2, 3):
        for found in ranks(2).run(ranges_of_a_step, stage):
            assert phases <= found, (stage, phases - found)
            assert ("unshard" in found) == (stage == 3)
