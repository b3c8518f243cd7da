"""Timers, throughput, memory estimates, FLOPs and monitors under DeepSpeed's names."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.dense import STAGES
from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.compat.deepspeed import deepspeed_measure as measure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock be 0.25 s after the one before."""
    ticks = itertools.count(0.0, 0.25)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))


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


def written(folder: str) -> bool:
    given: dict[str, Any] = {"enabled": True, "output_path": folder, "job_name": "run"}
    monitor = measure.MonitorMaster(measure.get_monitor_config({"csv_monitor": given, "train_batch_size": 3}))
    monitor.write_events([("Train/loss", 0.5, 7)])
    return monitor.enabled


def test_monitors_write_on_rank_0(ranks: Pools, tmp_path: Path):
    assert ranks(2).run(written, str(tmp_path)) == [True, False]
    (file,) = tmp_path.rglob("*.csv")
    assert list(csv.reader(file.open()))[1] == ["7", "0.5"]
