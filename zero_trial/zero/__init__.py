"""Sharded parameters, gradients and optimizer state: one set of pieces for every ZeRO stage."""

from zero_trial.zero.access import (
    register_external_parameter,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from zero_trial.zero.gathered import GatheredParameters
from zero_trial.zero.init import Init
from zero_trial.zero.model import ShardedModel
from zero_trial.zero.optimizer import ShardedOptimizer
from zero_trial.zero.plan import ZeroPlan, plan_for_stage
from zero_trial.zero.settings import ShardingSettings

__all__ = [
    "GatheredParameters",
    "Init",
    "ShardedModel",
    "ShardedOptimizer",
    "ShardingSettings",
    "ZeroPlan",
    "plan_for_stage",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_optimizer_state",
]
