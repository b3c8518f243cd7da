"""Tests for zero_trial/sharding/model.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_model, mesh_for
from tests.support.models import TinyLM
from tests.support.pool import Pools
from zero_trial.precision import dtype_policy
from zero_trial.sharding.grouping import GroupingLimits, ManualGroup
from zero_trial.sharding.model import ManualGroups, ParamGroups, build_param_groups
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.zero import ShardingSettings, plan_for_stage

FREE_ALL = ShardingSettings(limits=GroupingLimits(persistence=0))


def make(
    module: nn.Module, stage: int, manual_groups: Sequence[ManualGroup] = (), housed: list[str] | None = None
) -> ParamGroups:
    def house(group: ParamGroup) -> None:
        if housed is not None:
            housed.append(group.name)

    opt_groups = [[param for param in module.parameters() if param.requires_grad]]
    plan, policy = plan_for_stage(stage), dtype_policy("fp32")
    return build_param_groups(
        module, opt_groups, plan, mesh_for(stage), policy, FREE_ALL, ManualGroups(manual_groups), house
    )


def test_groups_that_are_freed_know_the_modules_that_they_stand_for() -> None:
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.LayerNorm(8))
    groups = make(module, 3)
    assert set(groups.freed) == set(groups.modules)
    assert {id(group) for chosen in groups.freed.values() for group in chosen} == {id(group) for group in groups.all}
    assert {tuple(map(id, block)) for block in groups.modules.values()} == {
        *((id(part),) for part in module[:3]),
        (id(module),),
    }
    assert make(nn.Linear(8, 8), 1).freed == {}


def test_each_group_is_housed_in_its_turn() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    housed: list[str] = []
    groups = make(module, 3, housed=housed)
    assert housed == [group.name for group in groups.all]
    assert len({group.trainable for group in groups.all}) == 2


def test_where_a_schedule_tells_no_module_stands_for_a_group() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    halves = [
        ManualGroup(name, frozenset(map(id, layer.parameters()))) for name, layer in zip("ab", module, strict=True)
    ]
    groups = make(module, 3, halves)
    assert set(groups.freed) == {"a", "b"}
    assert groups.modules == {}


def bits(stage: int, precision: str) -> bool:
    """Each rank builds other values; the groups hold rank 0's, and so do their masters, unrounded."""
    mesh = mesh_for(stage)
    torch.manual_seed(mesh.rank)
    model = make_model(TinyLM(), stage, precision=precision, mesh=mesh, settings=FREE_ALL)
    torch.manual_seed(0)
    plain = dict(TinyLM().named_parameters())
    for group in model.groups:
        for piece in group.layout.pieces(mesh.shard.index):
            expected = plain[piece.slot.name].detach().reshape(-1)[piece.start : piece.stop]
            if not torch.equal(group.master[piece.offset : piece.offset + piece.numel], expected):
                return False
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_are_rank_0s_values_unrounded(ranks: Pools, stage: int, precision: str) -> None:
    assert ranks(2).run(bits, stage, precision) == [True, True]


def test_the_groups_of_stage_3_follow_the_models_blocks() -> None:
    settings = ShardingSettings(limits=GroupingLimits(persistence=100, bucket=1))
    model = make_model(TinyLM(), 3, settings=settings)
    blocks = {group.block for group in model.groups if not group.name.startswith("small")}
    assert "" in blocks
    assert {f"blocks.{index}" for index in range(3)} <= {block for known in blocks for block in (known,)} or len(
        blocks
    ) > 1
    small = [slot.name for group in model.groups if group.name.startswith("small") for slot in group.layout.slots]
    assert small
    assert all(name.endswith(("norm.weight", "norm.bias", "down.bias")) for name in small)
