"""Tests for zero_trial/sharding/full_params.py; what users see of it is in test_gathered.py."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.parts import make_unit, mesh_for, parameters
from zero_trial.errors import TrialError
from zero_trial.sharding.full_params import SummonedParams


def test_visits_open_what_is_closed_and_leave_what_was_open() -> None:
    units = [make_unit(parameters([(4, 4)], seed=seed), 3) for seed in range(2)]
    waited: list[bool] = []
    visits = SummonedParams(units, lambda: waited.append(True), mesh_for(3).data)
    units[1].start_gather()
    units[1].finish_gather()
    params = [param for unit in units for param in unit.params]
    visits.open(params)
    visits.open(params)
    assert waited == [True, True]
    assert all(unit.live and unit.pins == 2 for unit in units)
    visits.close(params, None)
    assert units[0].live, "the outer visit is not over"
    visits.close(params, None)
    assert [unit.live for unit in units] == [False, True]


def test_edits_reach_shard_and_master() -> None:
    unit = make_unit(parameters([(4, 4)]), 3)
    visits = SummonedParams([unit], lambda: None, mesh_for(3).data)
    visits.open(unit.params)
    with torch.no_grad():
        unit.params[0].fill_(3.0)
    visits.close(unit.params, 0)
    assert unit.shard[:16].eq(3).all()


def test_a_step_inside_a_block_that_edits_is_refused() -> None:
    unit = make_unit(parameters([(4, 4)]), 3)
    visits = SummonedParams([unit], lambda: None, mesh_for(3).data)
    visits.open(unit.params)
    unit.free(stale=True)
    with pytest.raises(TrialError, match="stepped inside a block"):
        visits.close(unit.params, 0)
