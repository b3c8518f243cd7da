"""Tests for zero_trial/sharding/full_params.py; what users see of it is in test_gathered.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_group, mesh_for, parameters
from zero_trial.errors import TrialError
from zero_trial.sharding.full_params import FullParams
from zero_trial.sharding.param_group import ParamGroup, ParamPublisher


class Waits(ParamPublisher):
    """A publisher that counts who waited for it."""

    waited = 0

    def wait(self) -> None:
        self.waited += 1


class Model:
    """Without an optimizer."""


def full_params(groups: list[ParamGroup]) -> tuple[FullParams, Waits]:
    module, publisher = nn.Module(), Waits(nn.Module(), groups)
    return FullParams(Model(), module, groups, publisher, mesh_for(3).data), publisher  # type: ignore[arg-type]


def test_visits_open_what_is_closed_and_leave_what_was_open() -> None:
    groups = [make_group(parameters([(4, 4)], seed=seed), 3) for seed in range(2)]
    visits, publisher = full_params(groups)
    groups[1].unshard_async()
    groups[1].finish_unshard()
    params = [param for group in groups for param in group.params]
    visits.open(params)
    visits.open(params)
    assert publisher.waited == 2
    assert all(group.live and group.pins == 2 for group in groups)
    visits.close(params, None)
    assert groups[0].live, "the outer visit is not over"
    visits.close(params, None)
    assert [group.live for group in groups] == [False, True]


def test_edits_reach_shard_and_master() -> None:
    group = make_group(parameters([(4, 4)]), 3)
    visits, _ = full_params([group])
    visits.open(group.params)
    with torch.no_grad():
        group.params[0].fill_(3.0)
    visits.close(group.params, 0)
    assert group.shard[:16].eq(3).all()


def test_a_step_inside_a_block_that_edits_is_refused() -> None:
    group = make_group(parameters([(4, 4)]), 3)
    visits, _ = full_params([group])
    visits.open(group.params)
    group.reshard(stale=True)
    with pytest.raises(TrialError, match="stepped inside a block"):
        visits.close(group.params, 0)
