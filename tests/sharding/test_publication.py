"""Each group is published as soon as its update is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sharding.parts import Small, add_optimizer, build_small, make_model, optimizer_of
from tests.support.pool import Pools
from zero_trial.ops.optimizers import FusedAdam
from zero_trial.sharding.grouping import GroupingLimits, ShardingSettings
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.param_group import ParamGroup


class NoFusion(FusedAdam):
    """The same arithmetic in three passes: gradients are widened first, weights are rounded
    afterwards."""

    fuses = False


def test_groups_go_in_the_models_order_as_soon_as_they_are_done() -> None:
    model = build_small(1)
    optimizer = add_optimizer(model, FusedAdam, lr=0.1)
    published: list[str] = []
    for group in model.groups:
        group.publish = lambda rounded=False, group=group: published.append(group.name)  # type: ignore[method-assign]
    names = [group.name for group in model.groups]
    assert len(names) > 2
    of_first = [group for group in optimizer.updated if group is model.groups[0]]
    rest = [group for group in optimizer.updated if group is not model.groups[0]]

    def updates() -> Iterator[tuple[list[ParamGroup], bool]]:
        yield rest, True
        assert published == [], "the first group is not done, so none may go: another rank's order is the same"
        yield of_first[:1], True
        yield of_first[1:], True
        assert published == names

    model.unsharder.publish(model.groups, optimizer.updated, updates())
    assert published == names


def train(model: ShardedModel, dtype: torch.dtype, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        x = torch.linspace(-1, 1, 33).view(3, 11).to(dtype) * (step + 1)
        loss = model.module(x)
        model.begin_backward(reduce=True, last=True)
        loss.backward()
        model.end_backward()
        model.wait_before_writing()
        optimizer = optimizer_of(model)
        updates = optimizer.update(0.5 / model.mesh.data.size)
        model.unsharder.publish(model.groups, optimizer.updated, updates)
        model.unsharder.end_step()
        model.reducer.reset()
    return [group.master.clone() for group in model.groups] + [group.shard.clone() for group in model.groups]


def run_both(stage: int, precision: str, fused: type, plain: type) -> tuple[bool, int]:
    """Whether the one-pass step and the three-pass step left the same bits, and how many different
    values there were to differ in."""
    results = []
    for base in (fused, plain):
        torch.manual_seed(0)
        module = Small()
        model = make_model(
            module,
            stage,
            precision=precision,
            settings=ShardingSettings(limits=GroupingLimits(bucket=100, persistence=0)),
        )
        add_optimizer(model, base, lr=0.05, weight_decay=0.1)
        results.append(train(model, model.policy.param))
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, torch.cat(results[0]).unique().numel()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_pass_has_the_bits_of_three(stage: int, precision: str) -> None:
    same, values = run_both(stage, precision, FusedAdam, NoFusion)
    assert same
    assert values > 200


def _on_ranks(stage: int, precision: str) -> tuple[bool, int]:
    return run_both(stage, precision, FusedAdam, NoFusion)


@pytest.mark.parametrize("stage", [1, 3])
def test_on_two_ranks(ranks: Pools, stage: int) -> None:
    for same, values in ranks(2).run(_on_ranks, stage, "bf16"):
        assert same
        assert values > 50
