"""Timers, throughput, memory estimates, FLOPs and monitors under DeepSpeed's names."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.dense import STAGES
from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.compat.deepspeed import deepspeed_measure as measure
from zero_trial.errors import TrialError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock be 0.25 s after the one before."""
    ticks = itertools.count(0.0, 0.25)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))


def test_timers_by_name(clock: None, capsys: pytest.CaptureFixture[str]):
    timers = measure.SynchronizedWallClockTimer()
    for _ in range(3):
        timers("fwd").start()
        timers("fwd").stop()
    assert list(timers.get_timers()) == ["fwd"]
    assert timers("fwd").mean() == 250.0 and timers.get_mean(["fwd", "bwd"]) == {"fwd": 250e3}
    timers.log(["fwd", "bwd"], normalizer=3, memory_breakdown=True)
    said = capsys.readouterr().out
    assert "fwd: 250.00" in said and "bwd" not in said and "max_mem_allocated" in said
    assert timers("fwd").elapsed() == 0.0
    timers("fwd").start()
    with pytest.raises(TrialError, match="fwd"):
        timers("fwd").start()
    assert timers("fwd").elapsed(reset=False) == 250.0 and timers("fwd").started_
    timers("fwd").reset()
    with pytest.raises(TrialError, match="fwd"):
        timers("fwd").stop()


def test_the_mean_is_trimmed():
    assert measure.trim_mean([100.0, *[1.0] * 8, -100.0], 0.1) == 1.0
    assert measure.trim_mean([], 0.1) == 0


def test_a_timer_that_measures_nothing():
    timers = measure.NoopTimer()
    timers("fwd").start()
    timers("fwd").stop(record=True)
    assert timers("fwd").elapsed() == timers("fwd").mean() == 0 and timers.get_timers() == {}
    assert timers.log(["fwd"]) is None


def test_samples_per_second(clock: None):
    said: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = measure.ThroughputTimer(config, 8, start_step=1, steps_per_output=2, logging_fn=said.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        for last in (False, True):
            timer.start()
            timer.stop(global_step=last)
    # two measured steps of 8 samples, of two micro-steps of 0.25 s each
    assert timer.avg_samples_per_sec() == 16.0 and len(said) == 1 and "global_step=2" in said[0]
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
    config.enabled = False
    timer.start()
    timer.stop(global_step=True)
    assert timer.global_step_count == 3


def kept(stage: str) -> tuple[int, int]:
    engine = make_engine(TinyLM, {"zero_optimization": STAGES[stage], "bf16": {"enabled": True}})
    train_engine(engine, range(1))  # Adam's moments come with the first step
    return sum(engine.persistent_bytes().values()), sum(param.numel() for param in TinyLM().parameters())


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_estimate_is_what_an_engine_keeps(ranks: Pools, stage: str):
    """It leaves out what is gathered, and what padding adds."""
    for found, count in ranks(2).run(kept, stage):
        if stage == "zero2":
            _, device = measure.estimate_zero2_model_states_mem_needs(count, 2, cpu_offload=False)
        else:
            _, device, layer = measure.estimate_zero3_model_states_mem_needs(
                count, 0, 2, cpu_offload=False, cpu_offload_params=False
            )
            assert layer == 0
        assert found == pytest.approx(device, rel=0.03)


def test_estimates_of_hosts():
    two, three = measure.estimate_zero2_model_states_mem_needs, measure.estimate_zero3_model_states_mem_needs
    assert two(1000, 4, 2, True, 1.0) == (4 * 1000 * 4, 2000 + 250)
    assert two(1000, 4, 2, False, 1.0) == (4 * 1000 * 4, 2000 + 1750)
    assert two(1000, 1, 1, True, 2.0)[0] == 2 * 12 * 1000
    assert three(1000, 100, 4, 2, True, True, True, 1.0) == (14 * 1000 // 2, 400 + 250, 400)
    assert three(1000, 100, 4, 2, True, False, False, 1.0) == (4 * 1000 * 4, 400 + 500, 400)
    assert three(1000, 100, 4, 2, False, False, True, 1.0) == (4 * 100 * 4, 400 + 2000, 400)


@pytest.mark.parametrize(("stage", "rows"), [(2, 2), (3, 6)])
def test_estimates_are_printed(stage: int, rows: int, capsys: pytest.CaptureFixture[str]):
    model = nn.Sequential(nn.Linear(1000, 2000, bias=False), nn.Linear(2000, 10))
    getattr(measure, f"estimate_zero{stage}_model_states_mem_needs_all_live")(model, 2, 1)
    said = capsys.readouterr().out
    assert said.count("offload_optimizer") == rows and "2,020,010 parameters" in said
    assert ("2,000,000 in the largest layer" in said) == (stage == 3)
    sizes = (2_020_010, 2_000_000) if stage == 3 else (2_020_010,)
    getattr(measure, f"estimate_zero{stage}_model_states_mem_needs_all_cold")(*sizes, 2, 1)
    assert capsys.readouterr().out == said


def test_a_profile_of_forwards(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    profiler = measure.FlopsProfiler(model)
    for _ in range(2):
        profiler.start_profile(ignore_list=[nn.ReLU])
        model(torch.ones(3, 4))
        profiler.stop_profile()
    flops = 2 * 2 * 3 * (4 * 8 + 8 * 2)
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (flops, flops // 2)
    assert profiler.get_total_params() == 58 and profiler.get_total_duration() > 0
    assert profiler.get_total_flops(as_string=True) == f"{flops} FLOP"
    profiler.print_model_profile(output_file=tmp_path / "profile.txt")
    profiler.end_profile()
    text = (tmp_path / "profile.txt").read_text()
    assert "Linear" in text and "ReLU" not in text
    model(torch.ones(3, 4))
    assert profiler.get_total_flops() == flops
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0


def test_numbers_as_text():
    assert measure.number_to_string(1234567) == "1.23 M" and measure.number_to_string(0) == "0 "
    assert measure.number_to_string(1234567, "K", 1) == "1234.6 K"
    assert measure.flops_to_string(2e12) == "2 TFLOPS" and measure.macs_to_string(1500) == "1.5 KMACs"
    assert measure.bytes_to_string(5e9) == "5 GB" and measure.duration_to_string(0.0021) == "2.1 ms"
    assert measure.params_to_string(7e9) == "7 B" and measure.params_to_string(7e9, "M") == "7000 M"


def written(folder: str) -> bool:
    given: dict[str, Any] = {"enabled": True, "output_path": folder, "job_name": "run"}
    monitor = measure.MonitorMaster(measure.get_monitor_config({"csv_monitor": given, "train_batch_size": 3}))
    monitor.write_events([("Train/loss", 0.5, 7)])
    return monitor.enabled


def test_monitors_write_on_rank_0(ranks: Pools, tmp_path: Path):
    assert ranks(2).run(written, str(tmp_path)) == [True, False]
    (file,) = tmp_path.rglob("*.csv")
    assert list(csv.reader(file.open()))[1] == ["7", "0.5"]
