"""Stopwatches, with a clock and events that the test turns."""

from __future__ import annotations

import itertools

import pytest
import torch

from zero_trial.engine.profile import _PAIRS_KEPT, CudaTimers, Timers, make_timers


def test_sums_by_name_until_they_are_taken():
    ticks = iter([0.0, 1.0, 5.0, 5.5, 6.0, 7.0])
    timers = Timers(lambda: next(ticks))
    for phase in ("forward", "backward", "forward"):
        timers.begin(phase)
        timers.end(phase)
    assert timers.take() == {"forward": 2000.0, "backward": 500.0}
    assert timers.take() == {}


def test_phases_may_overlap():
    ticks = iter([0.0, 1.0, 2.0, 4.0])
    timers = Timers(lambda: next(ticks))
    timers.begin("outer")
    timers.begin("inner")
    timers.end("inner")
    timers.end("outer")
    assert timers.take() == {"inner": 1000.0, "outer": 4000.0}


def test_a_phase_that_was_cut_short_is_begun_again():
    ticks = iter([0.0, 10.0, 11.0])
    timers = Timers(lambda: next(ticks))
    timers.begin("forward")
    timers.begin("forward")
    timers.end("forward")
    assert timers.take() == {"forward": 1000.0}


class FakeDevice:
    """Events that are passed only when the device has got that far; each lies one millisecond after the one before."""

    def __init__(self) -> None:
        self.times = itertools.count()
        self.passed = -1
        self.waits = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.time = -1

    def record(self) -> None:
        self.time = next(self.device.times)

    def query(self) -> bool:
        return self.time <= self.device.passed

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits += 1
            self.device.passed = self.time

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "read before the device has passed it"
        return float(other.time - self.time)


def test_events_are_waited_for_only_when_the_sums_are_taken():
    device = FakeDevice()
    timers = CudaTimers(device.event)
    for _ in range(3):
        timers.begin("forward")
        timers.end("forward")
    assert device.waits == 0
    assert timers.take() == {"forward": 3.0}
    assert device.waits == 1
    assert timers.take() == {}


def test_passed_events_are_added_up_on_the_way():
    device = FakeDevice()
    timers = CudaTimers(device.event)
    for _ in range(3 * _PAIRS_KEPT):
        timers.begin("step")
        timers.end("step")
        device.passed += 2
    assert device.waits == 0
    assert len(timers._pairs) <= _PAIRS_KEPT
    assert timers.take() == {"step": pytest.approx(3.0 * _PAIRS_KEPT)}


def test_the_clock_of_a_device():
    assert type(make_timers(torch.device("cpu"))) is Timers
    assert type(make_timers(torch.device("cuda", 0))) is CudaTimers
