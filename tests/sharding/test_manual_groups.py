"""Manual groups: gathered, freed and reduced by a schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.sharding.parts import make_grad_buffer, make_group, parameters
from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.sharding.grouping import GroupingLimits, ManualGroup, ManualGroups
from zero_trial.sharding.plan import ReduceAt
from zero_trial.sharding.precision import dtype_policy
from zero_trial.zero import ShardedModel, ShardingSettings, plan_for_stage


def scheduled(stage: int) -> list[object]:
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


def test_no_group_spans_two_manual_groups_and_all_follow_the_schedule(ranks: Pools) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for scale in (1, 2):
        x = torch.ones(2, 8) * scale
        for layer in module:
            x = torch.tanh(layer(x))
        x.sum().backward()
    expected = sum(param.grad.double().square().sum().item() for param in module.parameters())
    for stage, freed in ((1, False), (3, True)):
        both = ranks(2).run(scheduled, stage)
        for *owners, during, after, _ in both:
            assert owners == [1, 1]
            assert during == [True, True]
            assert after == [not freed, not freed]
        assert abs(sum(one[-1] for one in both) - expected) < 1e-5 * expected


def test_groups_and_gradient_buffers_are_found_by_manual_group() -> None:
    groups = [make_group(parameters([(4, 4)], seed=seed)) for seed in range(3)]
    copies: Any = SimpleNamespace(index=1, size=2)
    manual_groups = ManualGroups(
        [
            ManualGroup("a", frozenset(map(id, (*groups[0].params, *groups[2].params)))),
            ManualGroup("tied", frozenset(map(id, groups[1].params)), copies, owner=0, module="embed"),
        ]
    )
    grad_buffers = [make_grad_buffer(group)[0] for group in groups]
    assert manual_groups.grad_buffers(grad_buffers) == {
        "a": [grad_buffers[0], grad_buffers[2]],
        "tied": [grad_buffers[1]],
    }
    assert [manual_groups.owns(group) for group in groups] == [True, False, True]
    assert manual_groups.is_copy("embed.weight") and not manual_groups.is_copy("embedding.weight")
