"""ZB-H1: its picture and its prices."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, picture, report
from zero_trial.pipeline.simulate import Costs


def test_picture():
    assert picture("zb_h1", 3, 3) == drawn("""
        rank 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
        rank 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2
    """)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 2), (2, 8), (4, 4), (4, 9), (6, 12)])
def test_prices(stages: int, micro_batches: int):
    got = report("zb_h1", stages, micro_batches)
    assert got.makespan == 3 * micro_batches + stages - 1
    assert all(got.idle(rank) == stages - 1 for rank in range(stages))
    assert [rank.peak_activations for rank in got.ranks] == [min(stages, micro_batches)] * stages


@pytest.mark.parametrize("costs", [Costs(4, 5, 3), Costs(2, 3, 2), Costs(1, 1, 1)])
def test_idle_time_by_costs(costs: Costs):
    """(P-1)(F+I-W), as the paper has it; 1F1B's is (P-1)(F+I+W)."""
    idle = 3 * (costs.forward + costs.input_gradient - costs.weight_gradient)
    assert report("zb_h1", 4, 12, costs=costs).idle(0) == idle
    assert report("1f1b", 4, 12, costs=costs).idle(0) == idle + 3 * 2 * costs.weight_gradient
