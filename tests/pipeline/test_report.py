"""Reports of simulated schedules."""

from __future__ import annotations

import json

import pytest

from tests.pipeline.lowered import report
from zero_trial.pipeline.simulate import SimulationReport


def test_time_and_bubble():
    got = report("1f1b", 2, 3)
    assert (got.makespan, got.idle(0), got.idle(1)) == (12, 3, 3)
    assert got.bubble == pytest.approx(6 / 24)


def test_for_machines():
    body = json.loads(json.dumps(report("1f1b", 2, 3).as_dict()))
    assert body["makespan"] == 12 and body["bubble"] == pytest.approx(0.25)
    assert body["ranks"][0] == {
        "rank": 0,
        "idle": 3,
        "peak_activations": 2,
        "peak_parameters": 0,
        "peak_gradients": 1,
        "peak_waiting": 1,
        "gathers": 0,
        "reductions": 1,
        "tied_reductions": 0,
        "messages": 3,
    }


def test_nothing_takes_no_time():
    assert (SimulationReport(()).makespan, SimulationReport(()).bubble) == (0, 0)
