"""The lines that are printed every so many steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from zero_trial.engine.observe import (
    PeriodicLines,
    comms_line,
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
    waits: list[int] = []
    lines = PeriodicLines(
        engine,
        2,
        [lambda steps, seconds: f"{steps} steps in {seconds} s"],
        lambda: waits.append(engine.global_steps),
        lambda: next(times),
    )
    with caplog.at_level(logging.INFO, "zero_trial"):
        for _ in range(5):
            engine.step()
            lines.after_step()
    assert [record.getMessage() for record in caplog.records] == ["2 steps in 4.0 s", "2 steps in 1.0 s"]
    assert waits == [2, 4]


def test_progress():
    engine: Any = FakeEngine()
    with_rate, without = progress_line(engine, with_rate=True), progress_line(engine, with_rate=False)
    assert without(0, 1.0) == "step=0 skipped=0 lr=[0.1] grad_norm=-"
    engine.step()
    engine.step()
    assert with_rate(2, 0.5) == "step=2 skipped=0 lr=[0.1] grad_norm=1.25 samples/s=32.0"
    engine.step()
    assert with_rate(1, 0.5).endswith("samples/s=16.0")


def test_timers_are_per_step_and_what_is_left_is_other():
    ticks = iter([0.0, 0.002, 0.0, 0.004, 0.0, 0.002])
    timers = Timers(lambda: next(ticks))
    for phase in ("forward", "forward", "step"):
        timers.begin(phase)
        timers.end(phase)
    line = timer_line(timers)
    assert line(2, 0.010) == "ms per step: forward 3.00 | step 1.00 | other 1.00"
    assert line(2, 0.001) == "ms per step: other 0.50"


def test_memory():
    engine: Any = FakeEngine()
    line = memory_line(engine)
    assert line(1, 1.0).startswith("memory: parameters 2.0 MiB, gradients 1.0 MiB, optimizer 0.0 MiB; process ")
    assert device_memory(torch.device("cpu")).endswith(" MiB resident at most")
    assert float(device_memory(torch.device("cpu")).split()[1]) > 10
    assert mib(3 << 19) == "1.5 MiB"


def test_communication():
    engine: Any = FakeEngine()
    line = comms_line(engine)
    assert line(1, 1.0) == (
        "communication (sent by rank 0):\n"
        "collective/axis   calls  elements   bytes\n"
        "all_gather/shard      3    12,000  48,000"
    )
    assert comms_table({}) == "communication: nothing was sent"
