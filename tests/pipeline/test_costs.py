"""Costs of the computations."""

from __future__ import annotations

from zero_trial.pipeline.schedule import COMPUTE, ActionKind
from zero_trial.pipeline.simulate import Costs


def test_a_whole_backward_costs_both_halves():
    costs = Costs(forward=2, input_gradient=3, weight_gradient=5).by_kind()
    assert costs == {ActionKind.F: 2, ActionKind.I: 3, ActionKind.W: 5, ActionKind.B: 8}
    assert set(costs) == COMPUTE
