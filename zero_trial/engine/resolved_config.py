"""Resolve ds_config into the values that the parts use: plan, mesh shape, dtypes, sizes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zero_trial.comm import MeshShape
from zero_trial.ds_config.batch import BatchTriple, solve_axes, solve_batch
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.sharding.grouping import GroupingLimits, LeafRules, ShardingSettings, UnshardLimits
from zero_trial.sharding.plan import Home, Lifetime, ZeroPlan, plan_for_stage
from zero_trial.sharding.precision import (
    DtypePolicy,
    DynamicScale,
    StaticScale,
    autocast_dtype,
    dtype_from_name,
    dtype_policy,
)

# Elements. Below this, a parameter group's messages cost more than the memory that freeing it saves
# (half a megabyte in fp32).
SMALLEST_GROUP = 1 << 17


@dataclass(frozen=True)
class ResolvedConfig:
    """Everything that construction needs to know, decided before anything is built."""

    plan: ZeroPlan
    policy: DtypePolicy
    batch: BatchTriple
    sharding: ShardingSettings
    clip: float
    skip_nonfinite: bool
    divisor: int  # divides the sum of gradients over ranks; 1 keeps the sum
    autocast: torch.dtype | None  # dtype of torch.autocast during forward


def mesh_shape(config: DsConfig, world_size: int) -> MeshShape:
    """Return the mesh shape given by ``mesh``, ``mics_shard_size`` and the ZeRO stage."""
    axes = solve_axes(config, world_size)
    return MeshShape(axes.pipe, axes.replica, axes.shard, axes.model)


def home_of_parameters(config: DsConfig, device: str) -> Home:
    """Return where ``offload_param`` stores parameters of a rank that computes on ``device``."""
    section = config.zero_optimization.offload_param
    return Home.of(device, section.device if section is not None else "none")


def resolve_config(config: DsConfig, data_parallel_size: int, device: str = "cpu") -> ResolvedConfig:
    """Make all decisions for one engine on ``data_parallel_size`` ranks of ``device``."""
    zero = config.zero_optimization
    batch = solve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        data_parallel_size,
        given_by=config.sources,
    )
    home = home_of_parameters(config, device)
    plan = plan_for_stage(zero.stage, reduce_every=zero.reduce_every, reshard_after=zero.reshard_after, home=home)
    if zero.set_grads_to_none and plan.grads is Lifetime.ALWAYS:
        raise ConfigError(
            "full gradients always live at this stage, in one buffer that other ranks read directly",
            where="zero_optimization.set_grads_to_none",
            got=f"stage {zero.stage}",
            expected="stage 2 or 3",
            fix="Remove the key, or use stage 2, which communicates the same volume.",
        )
    return ResolvedConfig(
        plan=plan,
        policy=_policy(config, batch.accumulation),
        batch=batch,
        sharding=ShardingSettings(
            limits=GroupingLimits(
                bucket=zero.reduce_bucket_size,
                persistence=zero.param_persistence_threshold,
                model_persistence=zero.model_persistence_threshold,
                smallest_group=zero.module_granularity_threshold or SMALLEST_GROUP,
                kept_on_host=zero.offload_param.max_in_cpu if zero.offload_param and device == "cpu" else 0,
            ),
            live=UnshardLimits(zero.max_live_parameters, zero.max_reuse_distance, zero.prefetch_bucket_size),
            leaf=LeafRules(
                tuple(zero.leaf_module.classes), tuple(zero.leaf_module.names), tuple(zero.leaf_module.name_suffixes)
            ),
            wire_scale=_wire_scale(config, data_parallel_size),
            overlap=zero.overlap_comm is not False,
            grads_to_none=zero.set_grads_to_none,
        ),
        clip=config.gradient_clipping,
        skip_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        divisor=1 if config.gradient_allreduce_op == "sum" else data_parallel_size,
        autocast=autocast_dtype(config.torch_autocast.enabled, config.torch_autocast.dtype),
    )


def _policy(config: DsConfig, accumulation: int) -> DtypePolicy:
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and bf16.enabled:
        raise ConfigError(
            "fp16 and bf16 are both enabled", where="bf16.enabled", fix="Keep only one; bf16 needs no loss scale."
        )
    policy = dtype_policy(
        "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32",
        grad_accum_dtype=config.data_types.grad_accum_dtype,
        communication_data_type=config.communication_data_type,
        accumulation_steps=accumulation,
    )
    buffer = config.data_types.buffer_dtype
    if buffer is not None:
        policy = replace(policy, buffer=dtype_from_name(buffer, "data_types.buffer_dtype"), keep_constants=False)
    elif policy.param != torch.float32:  # otherwise every tensor keeps its own dtype
        policy = replace(policy, buffer=policy.param)
    policy = replace(policy, fp32_modules=config.data_types.keep_in_fp32_modules)
    # Under autocast to fp16 the parameters are fp32, but their gradients pass through fp16 and can
    # underflow.
    if not fp16.enabled and autocast_dtype(config.torch_autocast.enabled, config.torch_autocast.dtype) != torch.float16:
        return policy
    scale = (
        StaticScale(fp16.loss_scale)
        if fp16.loss_scale
        else DynamicScale(
            2.0**fp16.initial_scale_power,
            fp16.loss_scale_window,
            fp16.hysteresis,
            fp16.consecutive_hysteresis,
            fp16.min_loss_scale,
        )
    )
    return replace(policy, loss_scale=scale)


def _wire_scale(config: DsConfig, ranks: int) -> float:
    """Return the factor on gradients before their sum; the step applies the remaining factor."""
    if config.prescale_gradients:
        return 1.0 / ranks
    return 1.0 / config.gradient_predivide_factor
