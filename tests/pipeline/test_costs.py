"""Costs of the computations."""

from __future__ import annotations

from zero_trial.pipeline.actions import COMPUTE, Kind
from zero_trial.pipeline.costs import Costs


def test_a_whole_backward_costs_both_halves():
    costs = Costs(forward=2, input_gradient=3, weight_gradient=5).by_kind()
    assert costs == {Kind.F: 2, Kind.I: 3, Kind.W: 5, Kind.B: 8}
    assert set(costs) == COMPUTE
