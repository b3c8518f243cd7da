"""Tests for zero_trial/sharding/full_params.py; what users see of it is in test_gathered.py."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.parts import make_group, mesh_for, parameters
from zero_trial.errors import TrialError
from zero_trial.sharding.full_params import SummonedParams


def test_visits_open_what_is_closed_and_leave_what_was_open() -> None:
    groups = [make_group(parameters([(4, 4)], seed=seed), 3) for seed in range(2)]
    waited: list[bool] = []
    visits = SummonedParams(groups, lambda: waited.append(True), mesh_for(3).data)
    groups[1].start_gather()
    groups[1].finish_gather()
    params = [param for group in groups for param in group.params]
    visits.open(params)
    visits.open(params)
    assert waited == [True, True]
    assert all(group.live and group.pins == 2 for group in groups)
    visits.close(params, None)
    assert groups[0].live, "the outer visit is not over"
    visits.close(params, None)
    assert [group.live for group in groups] == [False, True]


def test_edits_reach_shard_and_master() -> None:
    group = make_group(parameters([(4, 4)]), 3)
    visits = SummonedParams([group], lambda: None, mesh_for(3).data)
    visits.open(group.params)
    with torch.no_grad():
        group.params[0].fill_(3.0)
    visits.close(group.params, 0)
    assert group.shard[:16].eq(3).all()


def test_a_step_inside_a_block_that_edits_is_refused() -> None:
    group = make_group(parameters([(4, 4)]), 3)
    visits = SummonedParams([group], lambda: None, mesh_for(3).data)
    visits.open(group.params)
    group.free(stale=True)
    with pytest.raises(TrialError, match="stepped inside a block"):
        visits.close(group.params, 0)
