"""Domains: gathered, freed and reduced when they are told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.precision import dtype_policy
from zero_trial.sharding.grouping import GroupingLimits, ManualGroup
from zero_trial.sharding.plan import ReduceAt
from zero_trial.zero import ShardedModel, ShardingSettings, plan_for_stage


def told(stage: int) -> list[object]:
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    mesh = build_mesh(MeshShape(shard=2))
    halves = [
        frozenset(id(param) for layer in module[start : start + 2] for param in layer.parameters()) for start in (0, 2)
    ]
    model = ShardedModel(
        module,
        [list(module.parameters())],
        plan_for_stage(stage).scheduled(reduce_at=ReduceAt.BOUNDARY),
        mesh,
        dtype_policy("fp32"),
        ShardingSettings(limits=GroupingLimits(persistence=0)),
        [ManualGroup("a", halves[0]), ManualGroup("b", halves[1])],
    )
    found: list[object] = []
    for group in model.groups:
        owners = {index for index, half in enumerate(halves) for param in group.params if id(param) in half}
        found.append(len(owners))
    x = torch.ones(2, 8) * (mesh.rank + 1)
    for name, layers in (("a", module[:2]), ("b", module[2:])):
        model.unsharder.unshard_async(name)
        model.unsharder.unshard(name, record=False)
        for layer in layers:
            x = torch.tanh(layer(x))
    found.append([group.live for group in model.groups])
    x.sum().backward()
    for name in ("b", "a"):
        model.end_pass(name)
        model.reduce(name)
        model.unsharder.reshard(name)
    model.reducer.wait()
    found.append([group.live for group in model.groups])
    found.append(torch.stack(model.owned_square_sums()).sum().item())
    model.remove_hooks()
    return found


def test_no_group_spans_two_domains_and_all_are_told(ranks: Pools) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for scale in (1, 2):
        x = torch.ones(2, 8) * scale
        for layer in module:
            x = torch.tanh(layer(x))
        x.sum().backward()
    expected = sum(param.grad.double().square().sum().item() for param in module.parameters())
    for stage, freed in ((1, False), (3, True)):
        both = ranks(2).run(told, stage)
        for *owners, during, after, _ in both:
            assert owners == [1, 1]
            assert during == [True, True]
            assert after == [not freed, not freed]
        assert abs(sum(one[-1] for one in both) - expected) < 1e-5 * expected


def test_of_copies_the_owner_counts() -> None:
    assert ManualGroup("x", frozenset()).owned
    assert ManualGroup("x", frozenset()).holders == 1
    copies: Any = SimpleNamespace(index=1, size=3)
    assert not ManualGroup("x", frozenset(), copies).owned
    assert ManualGroup("x", frozenset(), copies, owner=1).owned
    assert ManualGroup("x", frozenset(), copies).holders == 3
