"""The lines that are printed every so many steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.observe import (
    PeriodicLines,
    comms_table,
    device_memory,
    memory_line,
    mib,
    progress_line,
    timer_line,
)
from zero_trial.engine.profile import Timers


class FakeEngine:
    """The numbers of an engine, counted by hand."""

    def __init__(self) -> None:
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.device = torch.device("cpu")
        self.norm: float | None = None

    def step(self) -> None:
        self.global_steps += 1
        self.global_samples += 8
        self.norm = 1.25

    def train_batch_size(self) -> int:
        return 8

    def get_lr(self) -> list[float]:
        return [0.1]

    def get_global_grad_norm(self) -> float | None:
        return self.norm

    def persistent_bytes(self) -> dict[str, int]:
        return {"parameters": 2 << 20, "gradients": 1 << 20, "optimizer": 0}

    def comms_summary(self) -> dict[str, dict[str, int]]:
        return {"all_gather/shard": {"calls": 3, "elements": 12000, "bytes": 48000}}


def test_every_so_many_steps(caplog: pytest.LogCaptureFixture):
    engine: Any = FakeEngine()
    times = iter([0.0, 4.0, 5.0])
    config = read_ds_config({"train_batch_size": 8, "steps_per_print": 2})
    lines = PeriodicLines(config, torch.device("cpu"), None, lambda: next(times))
    with caplog.at_level(logging.INFO, "zero_trial"):
        for _ in range(5):
            engine.step()
            lines.after_step(engine)
    assert [record.getMessage().split()[-1] for record in caplog.records] == ["samples/s=4.0", "samples/s=16.0"]


def test_a_resumed_run_counts_its_own_steps(caplog: pytest.LogCaptureFixture):
    engine: Any = FakeEngine()
    engine.global_steps, engine.global_samples = 98, 98 * 8
    times = iter([0.0, 2.0])
    config = read_ds_config({"train_batch_size": 8, "steps_per_print": 2})
    lines = PeriodicLines(config, torch.device("cpu"), None, lambda: next(times))
    with caplog.at_level(logging.INFO, "zero_trial"):
        for _ in range(2):
            engine.step()
            lines.after_step(engine)
    assert [record.getMessage().split()[-1] for record in caplog.records] == ["samples/s=8.0"]


def test_progress():
    engine: Any = FakeEngine()
    assert progress_line(engine, None) == "step=0 skipped=0 lr=[0.1] grad_norm=-"
    engine.step()
    engine.step()
    assert progress_line(engine, 32.0) == "step=2 skipped=0 lr=[0.1] grad_norm=1.25 samples/s=32.0"


def test_timers_are_per_step_and_what_is_left_is_other():
    ticks = iter([0.0, 0.002, 0.0, 0.004, 0.0, 0.002])
    timers = Timers(lambda: next(ticks))
    for phase in ("forward", "forward", "step"):
        timers.begin(phase)
        timers.end(phase)
    assert timer_line(timers, 2, 0.010) == "ms per step: forward 3.00 | step 1.00 | other 1.00"
    assert timer_line(timers, 2, 0.001) == "ms per step: other 0.50"


def test_memory():
    engine: Any = FakeEngine()
    line = memory_line(engine, torch.device("cpu"))
    assert line.startswith("memory: parameters 2.0 MiB, gradients 1.0 MiB, optimizer 0.0 MiB; process ")
    assert device_memory(torch.device("cpu")).endswith(" MiB resident at most")
    assert float(device_memory(torch.device("cpu")).split()[1]) > 10
    assert mib(3 << 19) == "1.5 MiB"


def test_communication():
    assert comms_table(FakeEngine().comms_summary()) == (
        "communication (sent by rank 0):\n"
        "collective/axis   calls  elements   bytes\n"
        "all_gather/shard      3    12,000  48,000"
    )
    assert comms_table({}) == "communication: nothing was sent"
