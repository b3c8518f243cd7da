"""A profile of a step names its phases, so that a reader of the trace sees where ZeRO spends its time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zero_trial
from tests.support.pool import Pools


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
