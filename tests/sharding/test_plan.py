"""The lifetime table of a ZeRO stage."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from zero_trial.errors import ConfigError
from zero_trial.sharding.plan import Home, Lifetime, ReduceAt, Reshard, ZeroPlan, plan_for_stage

STAGES = [
    (0, False, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    (1, True, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    (2, True, Lifetime.ALWAYS, Lifetime.USE, ReduceAt.BOUNDARY),
    (3, True, Lifetime.USE, Lifetime.USE, ReduceAt.MICRO),
]


@pytest.mark.parametrize(("stage", "shard", "params", "grads", "at"), STAGES)
def test_lifetimes(stage: int, shard: bool, params: Lifetime, grads: Lifetime, at: ReduceAt) -> None:
    """Choices, and what always lives, override the stage and nothing else. A home away frees
    parameters at every stage."""
    plan = plan_for_stage(stage)
    assert plan == ZeroPlan(shard, params, grads, at, Reshard.WITHIN_LIMITS)
    assert plan.frees_parameters == (stage == 3) and not plan.persistent().frees_parameters
    assert plan.persistent() == replace(plan, params=Lifetime.ALWAYS)
    for every, after in itertools.product(["auto", "micro", "boundary"], ["auto", "forward", "step"]):
        chosen = plan_for_stage(stage, reduce_every=every, reshard_after=after)
        assert chosen == replace(plan, reduce_at=at if every == "auto" else ReduceAt(every), reshard=Reshard(after))
    for home in (Home.HOST, Home.NVME):
        away = plan_for_stage(stage, home=home)
        assert away == replace(plan, params=Lifetime.USE, home=home, whole_home=stage < 3)
        assert away.gathers_parameters == (stage == 3)
        assert away.at(Home.DEVICE) == plan and away.persistent() == plan.persistent()
        assert away.at(Home.HOST).at(Home.NVME) == plan_for_stage(stage, home=Home.NVME)
        assert away.scheduled(reduce_at=ReduceAt.MICRO).home is home


@pytest.mark.parametrize("stage", [-1, 4])
def test_other_stages_do_not_exist(stage: int) -> None:
    with pytest.raises(ConfigError, match=f"got {stage}, expected 0, 1, 2 or 3"):
        plan_for_stage(stage)


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
