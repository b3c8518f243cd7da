"""From ds_config to the values that the parts take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.comm import MeshShape
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.resolved_config import SMALLEST_GROUP, ResolvedConfig, mesh_shape, resolve_config
from zero_trial.errors import ConfigError
from zero_trial.sharding.plan import Lifetime, ReduceAt, Reshard
from zero_trial.sharding.precision import DynamicScale, StaticScale


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


def test_sizes_reach_their_parts():
    zero = {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "stage3_param_persistence_threshold": 10,
        "stage3_model_persistence_threshold": 20,
        "stage3_prefetch_bucket_size": 30,
        "stage3_max_live_parameters": 40,
        "stage3_max_reuse_distance": 50,
        "leaf_module": {"classes": ["Expert"], "name_suffixes": ["moe"]},
    }
    found = wired(zero_optimization=zero).sharding
    assert (found.limits.bucket, found.limits.persistence, found.limits.model_persistence) == (1000, 10, 20)
    assert found.limits.smallest_group == SMALLEST_GROUP
    assert (found.live.prefetch, found.live.max_live, found.live.max_reuse_distance) == (30, 40, 50)
    assert (found.leaf.classes, found.leaf.names, found.leaf.name_suffixes) == (("Expert",), (), ("moe",))
    assert wired(zero_optimization=zero | {"module_granularity_threshold": 7}).sharding.limits.smallest_group == 7


@pytest.mark.parametrize(
    ("config", "grad", "comm"),
    [
        ({"train_batch_size": 4}, torch.bfloat16, torch.bfloat16),
        ({"gradient_accumulation_steps": 2}, torch.float32, torch.float32),
        ({"gradient_accumulation_steps": 2, "communication_data_type": "bf16"}, torch.float32, torch.bfloat16),
        ({"train_batch_size": 4, "data_types": {"grad_accum_dtype": "fp32"}}, torch.float32, torch.float32),
    ],
)
def test_sixteen_bits(config: dict[str, Any], grad: torch.dtype, comm: torch.dtype):
    policy = wired(bf16={"enabled": True}, **config).policy
    assert (policy.param, policy.grad, policy.comm, policy.master) == (torch.bfloat16, grad, comm, torch.float32)


def test_loss_scales():
    scale = wired(
        fp16={"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2}
    ).policy.loss_scale
    assert isinstance(scale, DynamicScale)
    assert (scale.scale, scale.window, scale.hysteresis, scale.min_scale) == (32.0, 7, 3, 2.0)
    assert wired(fp16={"enabled": True, "loss_scale": 8}).policy.loss_scale == StaticScale(8.0)


def test_scaling_before_the_sum():
    assert wired(prescale_gradients=True).sharding.wire_scale == 0.25
    assert wired(gradient_predivide_factor=2.0).sharding.wire_scale == 0.5
    assert wired(gradient_allreduce_op="sum").divisor == 1


def test_two_precisions_are_refused():
    with pytest.raises(ConfigError, match="fp16 and bf16 are both enabled"):
        wired(fp16={"enabled": True}, bf16={"enabled": True})


def test_bf16_may_go_on_with_what_is_not_finite():
    assert not wired(bf16={"enabled": True, "check_grad_overflow": False}).skip_nonfinite
    assert wired(bf16={"enabled": True}).skip_nonfinite


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, MeshShape(replica=4)),
        ({"zero_optimization": {"stage": 1}}, MeshShape(shard=4)),
        ({"zero_optimization": {"stage": 3}, "mesh": {"shard": 2}}, MeshShape(shard=2, replica=2)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, MeshShape(shard=2, replica=2)),
    ],
)
def test_the_mesh(config: dict[str, Any], shape: MeshShape):
    assert mesh_shape(read_ds_config({"train_batch_size": 8} | config), 4) == shape


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_always_live_cannot_be_none(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, "set_grads_to_none": True}}
    with pytest.raises(ConfigError, match="set_grads_to_none"):
        resolve_config(read_ds_config(config), 2)
