"""From ds_config to the values that the parts take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.resolved_config import ResolvedConfig, resolve_config
from zero_trial.errors import ConfigError
from zero_trial.sharding.plan import Lifetime, ReduceAt, Reshard
from zero_trial.sharding.precision import StaticScale


def wired(ranks: int = 4, **config: Any) -> ResolvedConfig:
    return resolve_config(read_ds_config({"train_batch_size": 8} | config), ranks)


def test_an_empty_config_is_plain_data_parallel():
    found = wired()
    assert found.plan.params is Lifetime.ALWAYS
    assert not found.plan.shard_optimizer
    assert (found.batch.train_batch_size, found.batch.micro_batch_size, found.batch.accumulation) == (8, 2, 1)
    assert found.policy.param == found.policy.grad == found.policy.comm == torch.float32
    assert found.clip == 1.0, "DeepSpeed 0.19.8's default"
    assert (found.divisor, found.sharding.wire_scale) == (4, 1.0)
    assert found.skip_nonfinite
    assert found.policy.loss_scale == StaticScale(1.0)


@pytest.mark.parametrize(
    ("zero", "reduce_at", "reshard"),
    [
        ({"stage": 2}, ReduceAt.BOUNDARY, Reshard.WITHIN_LIMITS),
        ({"stage": 2, "reduce_every": "micro"}, ReduceAt.MICRO, Reshard.WITHIN_LIMITS),
        ({"stage": 3}, ReduceAt.MICRO, Reshard.WITHIN_LIMITS),
        ({"stage": 3, "reshard_after": "forward"}, ReduceAt.MICRO, Reshard.AFTER_FORWARD),
        ({"stage": 3, "reshard_after": "step", "reduce_every": "boundary"}, ReduceAt.BOUNDARY, Reshard.AFTER_STEP),
    ],
)
def test_the_plan_follows_the_zero_section(zero: dict[str, Any], reduce_at: ReduceAt, reshard: Reshard):
    plan = wired(zero_optimization=zero).plan
    assert (plan.reduce_at, plan.reshard) == (reduce_at, reshard)


def test_scaling_before_the_sum():
    assert wired(prescale_gradients=True).sharding.wire_scale == 0.25
    assert wired(gradient_predivide_factor=2.0).sharding.wire_scale == 0.5
    assert wired(gradient_allreduce_op="sum").divisor == 1


def test_bf16_may_go_on_with_what_is_not_finite():
    assert not wired(bf16={"enabled": True, "check_grad_overflow": False}).skip_nonfinite
    assert wired(bf16={"enabled": True}).skip_nonfinite


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_always_live_cannot_be_none(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, "set_grads_to_none": True}}
    with pytest.raises(ConfigError, match="set_grads_to_none"):
        resolve_config(read_ds_config(config), 2)
