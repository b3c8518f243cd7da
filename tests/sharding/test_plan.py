"""Tests for zero_trial/sharding/plan.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from zero_trial.errors import ConfigError
from zero_trial.sharding.plan import Home, Lifetime, ReduceAt, Reshard, ZeroPlan, plan_for_stage


def test_stage_3_keeps_nothing_longer_than_it_is_used() -> None:
    plan = plan_for_stage(3)
    assert (plan.shard_optimizer, plan.params, plan.grads) == (True, Lifetime.USE, Lifetime.USE)
    assert plan.reduces_every_micro_batch


STAGES = [
    (0, False, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    (1, True, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    (2, True, Lifetime.ALWAYS, Lifetime.USE, ReduceAt.BOUNDARY),
    (3, True, Lifetime.USE, Lifetime.USE, ReduceAt.MICRO),
]


@pytest.mark.parametrize(("stage", "shard", "params", "grads", "at"), STAGES)
def test_lifetimes(stage: int, shard: bool, params: Lifetime, grads: Lifetime, at: ReduceAt) -> None:
    assert plan_for_stage(stage) == ZeroPlan(shard, params, grads, at, Reshard.WITHIN_LIMITS)


@pytest.mark.parametrize("stage", [-1, 4, 10])
def test_other_stages_do_not_exist(stage: int) -> None:
    with pytest.raises(ConfigError, match=f"got {stage}, expected 0, 1, 2 or 3"):
        plan_for_stage(stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("every", "after"), list(itertools.product(["auto", "micro", "boundary"], ["auto", "forward", "step"]))
)
def test_choices_override_the_stage_and_nothing_else(stage: int, every: str, after: str) -> None:
    default, plan = plan_for_stage(stage), plan_for_stage(stage, reduce_every=every, reshard_after=after)
    assert plan.reduce_at is (default.reduce_at if every == "auto" else ReduceAt(every))
    assert plan.reshard is Reshard(after)
    assert (plan.shard_optimizer, plan.params, plan.grads) == (default.shard_optimizer, default.params, default.grads)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_persistent_changes_the_parameters_lifetime_alone(stage: int) -> None:
    plan = plan_for_stage(stage)
    kept = plan.persistent()
    assert kept.params is Lifetime.ALWAYS
    assert (kept.shard_optimizer, kept.grads, kept.reduce_at, kept.reshard) == (
        plan.shard_optimizer,
        plan.grads,
        plan.reduce_at,
        plan.reshard,
    )


@pytest.mark.parametrize("home", [Home.HOST, Home.NVME])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_home_away_frees_parameters_at_every_stage_and_changes_nothing_else(stage: int, home: Home) -> None:
    near, plan = plan_for_stage(stage), plan_for_stage(stage, home=home)
    assert plan.params is Lifetime.USE and plan.home is home
    assert plan.whole_home == (stage < 3) and plan.gathers_parameters == (stage == 3)
    assert plan == replace(near, params=Lifetime.USE, home=home, whole_home=stage < 3)
    assert plan.at(Home.DEVICE) == near and plan.persistent() == near.persistent()
    assert plan.at(Home.HOST).at(Home.NVME) == plan_for_stage(stage, home=Home.NVME)
    assert plan.scheduled(reduce_at=ReduceAt.MICRO).home is home


def test_what_a_place_means_depends_on_the_device() -> None:
    assert [Home.of("cpu", wanted) for wanted in ("none", "cpu", "nvme")] == [Home.DEVICE, Home.DEVICE, Home.NVME]
    assert [Home.of("cuda", wanted) for wanted in ("none", "cpu", "nvme")] == [Home.DEVICE, Home.HOST, Home.NVME]


def test_a_plan_describes_itself() -> None:
    assert plan_for_stage(0).describe() == (
        "parameters live always, gradients always (reduced at boundary), optimizer state whole on every rank"
    )
    assert plan_for_stage(3).describe() == (
        "parameters live use, gradients until reduced (reduced at micro), optimizer state one shard per rank"
    )


def test_only_stage_3_frees_parameters():
    assert [plan_for_stage(stage).frees_parameters for stage in range(4)] == [False, False, False, True]
    assert not plan_for_stage(3).persistent().frees_parameters
