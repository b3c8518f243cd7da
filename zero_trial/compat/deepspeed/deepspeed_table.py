"""DeepSpeed's modules and names, and what ``import deepspeed`` gives for them here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zero_trial.compat.deepspeed.deepspeed_refused import REFUSED_MODULES
from zero_trial.compat.finder import StandIn, StandInFinder, Table, install
from zero_trial.errors import ConfigError

VERSION = "0.19.8"
"""The DeepSpeed whose names these are."""

_PARTS = ("major", "minor", "patch")
VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = map(int, VERSION.split("."))
NO_BUILD = "[none]"
"""What DeepSpeed says for hash and branch where it was not built from its repository."""

VARIABLE = "ZERO_TRIAL_AS_DEEPSPEED"
"""Environment variable that installs the stand-in: 1, or "replace" where DeepSpeed is installed."""


def _at(place: str, *names: str) -> dict[str, str]:
    """Return names that are called the same in our module ``place``."""
    return {name: f"{place}:{name}" for name in names}


# --- names that stand in several modules ----------------------------------------------------------

_ENGINE = {
    "DeepSpeedEngine": "zero_trial.engine:Engine",
    "PipelineEngine": "zero_trial.engine.pipeline_engine:PipelineEngine",
}
_PIPE = _at("zero_trial.pipeline", "PipelineModule", "LayerSpec", "TiedLayerSpec")
_TOPOLOGY = {
    **_at("zero_trial.pipeline", "ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"),
    **_at("zero_trial.engine.compat", "PipelineParallelGrid"),
}
_ZERO = _at(
    "zero_trial.zero",
    *("Init", "GatheredParameters", "register_external_parameter"),
)
_FRAGMENTS = _at(
    "zero_trial.zero",
    *("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"),
    *("safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state"),
    *("safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state"),
    *("safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state"),
    "safe_update_full_grad_vectorized",
)
_LEAVES = _at(
    "zero_trial.zero",
    *("set_z3_leaf_modules", "unset_z3_leaf_modules", "get_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter"),
    *("set_z3_leaf_module", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"),
)
_ACCELERATOR = {
    **_at("zero_trial.compat.deepspeed.accelerator", "get_accelerator", "is_current_accelerator_supported"),
    "DeepSpeedAccelerator": "zero_trial.compat.deepspeed.accelerator:Accelerator",
}
_INIT = _at("zero_trial.comm", "init_distributed")
_STATUS = _at("zero_trial.sharding.guards.freed", "ZeroParamStatus")
# What initialize() returns, for isinstance.
_OPTIMIZER = {"DeepSpeedOptimizer": "zero_trial.sharding.optimizer:ShardedOptimizer"}
_CALLABLES = {
    "DeepSpeedOptimizerCallable": "collections.abc:Callable",
    "DeepSpeedSchedulerCallable": "collections.abc:Callable",
}
_COMM = {
    **_at("zero_trial.compat.deepspeed.deepspeed_comm", "init_distributed", "is_initialized"),
    **_at(
        "torch.distributed",
        *("ReduceOp", "ProcessGroup", "P2POp", "is_available", "destroy_process_group", "new_group"),
        *("get_rank", "get_world_size", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier"),
        *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "monitored_barrier"),
        *("recv", "reduce", "reduce_scatter", "scatter", "send"),
    ),
    **_at(
        "zero_trial.compat.deepspeed.deepspeed_comm",
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "get_local_rank", "log_summary"),
        *("get_all_ranks_from_group", "get_global_rank", "get_world_group"),
    ),
    "inference_all_reduce": "torch.distributed:all_reduce",
    "allgather_fn": "zero_trial.compat.deepspeed.deepspeed_comm:all_gather_into_tensor",
    "reduce_scatter_fn": "zero_trial.compat.deepspeed.deepspeed_comm:reduce_scatter_tensor",
    "has_all_gather_into_tensor": "zero_trial.compat.deepspeed.deepspeed_comm:has_them",
    "has_reduce_scatter_tensor": "zero_trial.compat.deepspeed.deepspeed_comm:has_them",
    "initialize_mesh_device": "torch.distributed.device_mesh:init_device_mesh",
}
_LAUNCHED = {
    **_at("zero_trial.compat.deepspeed.deepspeed_comm", "get_world_rank_from_launcher", "get_world_size_from_launcher"),
    "get_local_rank_from_launcher": "zero_trial.compat.deepspeed.deepspeed_comm:get_local_rank",
}
_LOG = _at("zero_trial.compat.deepspeed.deepspeed_utils", "logger", "log_dist", "set_log_level_from_string")
_DATA_GROUPS = ("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size")
_MODEL_GROUPS = ("get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size")
_GROUPS = {
    **_at("zero_trial.compat.deepspeed.deepspeed_comm", *_DATA_GROUPS, *_MODEL_GROUPS),
    **{
        name.replace("get_", "get_tensor_"): f"zero_trial.compat.deepspeed.deepspeed_comm:{name}"
        for name in _MODEL_GROUPS
    },
}
# What Hugging Face's libraries ask of the groups, by names with an underscore.
_INNER_GROUPS = {
    f"_{name}": f"zero_trial.compat.deepspeed.deepspeed_comm:{name}"
    for name in (
        *(*_DATA_GROUPS, *_MODEL_GROUPS[1:], "get_sequence_parallel_world_size", "get_sequence_parallel_rank"),
        *("get_sequence_parallel_group", "get_expert_parallel_group_dict"),
    )
}
_CHECKPOINT_NAMES = _at(
    "zero_trial.compat.deepspeed.deepspeed_utils",
    *("get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank"),
)
_CHECKPOINTING = _at(
    "zero_trial.activation_checkpointing",
    *("checkpoint", "configure", "get_cuda_rng_tracker", "is_configured", "model_parallel_cuda_manual_seed"),
    *("partition_activations_in_checkpoint", "reset", "set_num_layers"),
) | {
    "CudaRNGStatesTracker": "zero_trial.activation_checkpointing:RngStatesTracker",
    "non_reentrant_checkpoint": "zero_trial.activation_checkpointing:checkpoint",
}
_PROFILER = {
    **_at("zero_trial.engine.profile", "get_model_profile"),
    **_at("zero_trial.compat.deepspeed.deepspeed_measure", "FlopsProfiler"),
}
_LOADERS = _at("zero_trial.engine", "RepeatingLoader")
_ADAM = {
    "FusedAdam": "zero_trial.ops:FusedAdam",
    "DeepSpeedCPUAdam": "zero_trial.ops:CPUAdam",
}
_LAMB = _at("zero_trial.ops", "FusedLamb")
_LION = {"FusedLion": "zero_trial.ops:FusedLion", "DeepSpeedCPULion": "zero_trial.ops:FusedLion"}
_ADAGRAD = {"DeepSpeedCPUAdagrad": "zero_trial.ops:FusedAdagrad"}

_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
_OFFLOAD_SECTIONS = ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")

# --- the table ------------------------------------------------------------------------------------

OURS: dict[str, dict[str, str]] = {
    "deepspeed": {
        **_ENGINE,
        **_CALLABLES,
        **_OPTIMIZER,
        **_INIT,
        **_at("zero_trial.compat.deepspeed.accelerator", "get_accelerator"),
        **_at("zero_trial.compat.deepspeed.deepspeed_utils", "logger", "log_dist", "TORCH_DISTRIBUTED_DEFAULT_PORT"),
        "DeepSpeedConfig": "zero_trial.engine.compat:DeepSpeedConfig",
        "DeepSpeedConfigError": "zero_trial.errors:ConfigError",
        "version": "zero_trial.compat.deepspeed.deepspeed_table:VERSION",
        **dict.fromkeys(("git_hash", "git_branch"), "zero_trial.compat.deepspeed.deepspeed_table:NO_BUILD"),
        **_at("zero_trial.engine", "initialize", "add_config_arguments"),
        **_at("zero_trial.zero", "OnDevice"),
        "__version__": "zero_trial.compat.deepspeed.deepspeed_table:VERSION",
        **{
            f"__version_{part}__": f"zero_trial.compat.deepspeed.deepspeed_table:VERSION_{part.upper()}"
            for part in _PARTS
        },
        "__git_hash__": "zero_trial.compat.deepspeed.deepspeed_table:NO_BUILD",
        "__git_branch__": "zero_trial.compat.deepspeed.deepspeed_table:NO_BUILD",
        "PipelineModule": "zero_trial.pipeline:PipelineModule",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "dist": "deepspeed.comm",
        "zero": "deepspeed.runtime.zero",
    },
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime.base_optimizer": {**_OPTIMIZER, "ZeROOptimizer": _OPTIMIZER["DeepSpeedOptimizer"]},
    "deepspeed.runtime.bf16_optimizer": _at("zero_trial.engine.compat", "BF16_Optimizer"),
    "deepspeed.runtime.fp16.fused_optimizer": _at("zero_trial.engine.compat", "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": _at("zero_trial.engine.compat", "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.engine": {"DeepSpeedEngine": _ENGINE["DeepSpeedEngine"], **_CALLABLES},
    "deepspeed.runtime.pipe": {**_PIPE, "ProcessTopology": _TOPOLOGY["ProcessTopology"]},
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": _ENGINE["PipelineEngine"]},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.zero": {
        **_ZERO,
        **_STATUS,
        **_at("zero_trial.zero", "TiledLinear", "TiledLinearReturnBias", "unwrap_model_for_generation"),
    },
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        **_STATUS,
        **_at("zero_trial.compat.deepspeed.accelerator", "get_accelerator"),
        "unregister_external_parameter": "zero_trial.zero:unregister_external_parameter",
        # transformers changes the first around zero.Init, and compares with the second
        **_at("zero_trial.compat.deepspeed.deepspeed_utils", "zero_wrapper_for_fp_tensor_constructor"),
        **{f"_orig_torch_{name}": f"torch:{name}" for name in _CONSTRUCTORS},
    },
    "deepspeed.runtime.lr_schedules": _at(
        "zero_trial.engine.lr_schedules",
        *("LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.dataloader": _LOADERS,
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.accelerator.real_accelerator": {k: v for k, v in _ACCELERATOR.items() if "_" in k},
    "deepspeed.checkpoint": _CHECKPOINT_NAMES,
    "deepspeed.checkpoint.utils": {
        **_CHECKPOINT_NAMES,
        **_at("zero_trial.compat.deepspeed.deepspeed_utils", "clone_tensors_for_torch_save"),
    },
    "deepspeed.comm": {
        **_COMM,
        **_LAUNCHED,
        **_at("zero_trial.compat.deepspeed.accelerator", "get_accelerator"),
        **_at("zero_trial.compat.deepspeed.deepspeed_utils", "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"),
    },
    "deepspeed.comm.comm": _COMM,
    "deepspeed.comm.reduce_op": {"ReduceOp": _COMM["ReduceOp"]},
    "deepspeed.comm.utils": _LAUNCHED,
    "deepspeed.launcher.runner": _at("zero_trial.compat.deepspeed.deepspeed_utils", "DEEPSPEED_ENVIRONMENT_NAME"),
    "deepspeed.moe.utils": _at(
        "zero_trial.compat.deepspeed.deepspeed_utils",
        *("has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"),
    ),
    "deepspeed.monitor.config": _at("zero_trial.compat.deepspeed.deepspeed_measure", "get_monitor_config"),
    "deepspeed.monitor.monitor": {
        **_at("zero_trial.compat.deepspeed.deepspeed_measure", "MonitorMaster"),
        "Monitor": "zero_trial.engine.observe:Monitor",
    },
    "deepspeed.profiling.flops_profiler": _PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILER,
    "deepspeed.runtime.config": {
        "DeepSpeedConfig": "zero_trial.engine.compat:DeepSpeedConfig",
        "DeepSpeedConfigError": "zero_trial.errors:ConfigError",
    },
    "deepspeed.runtime.utils": _at(
        "zero_trial.compat.deepspeed.deepspeed_utils",
        *("clip_grad_norm_", "memory_status", "move_to_device", "partition_balanced", "partition_uniform"),
        *("see_memory_usage", "set_random_seed"),
    ),
    "deepspeed.runtime.zero.config": _at(
        "zero_trial.compat.deepspeed.deepspeed_config", "DeepSpeedZeroConfig", "ZeroStageEnum", *_OFFLOAD_SECTIONS
    ),
    "deepspeed.runtime.zero.offload_config": _at(
        "zero_trial.compat.deepspeed.deepspeed_config", "OffloadDeviceEnum", "OffloadStateTypeEnum", *_OFFLOAD_SECTIONS
    ),
    "deepspeed.runtime.zero.offload_states": _at("zero_trial.compat.deepspeed.deepspeed_measure", "get_state_devices"),
    "deepspeed.runtime.zero.stage3": {
        **_at("zero_trial.engine.compat", "DeepSpeedZeroOptimizer_Stage3"),
        **_at("zero_trial.zero", "unwrap_model_for_generation"),
        **_at(
            "zero_trial.compat.deepspeed.deepspeed_measure",
            *("estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold"),
            "estimate_zero3_model_states_mem_needs_all_live",
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        **_at("zero_trial.engine.compat", "DeepSpeedZeroOptimizer"),
        **_at(
            "zero_trial.compat.deepspeed.deepspeed_measure",
            *("estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold"),
            "estimate_zero2_model_states_mem_needs_all_live",
        ),
    },
    "deepspeed.runtime.zero.utils": {"ZeRORuntimeException": "zero_trial.errors:ZeroTrialError"},
    "deepspeed.runtime.zero.tiling": _at("zero_trial.zero", "TiledLinear", "TiledLinearReturnBias"),
    "deepspeed.utils": {
        **_at("zero_trial.zero", "OnDevice"),
        **_FRAGMENTS,
        **_LEAVES,
        **_LOADERS,
        **_LOG,
        **_GROUPS,
    },
    "deepspeed.utils.groups": {**_GROUPS, **_INNER_GROUPS},
    "deepspeed.utils.logging": {
        **_LOG,
        **_at("zero_trial.compat.deepspeed.deepspeed_utils", "print_dist", "warning_once"),
    },
    "deepspeed.utils.init_on_device": _at("zero_trial.zero", "OnDevice"),
    "deepspeed.utils.tensor_fragment": _FRAGMENTS,
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": _at(
        "zero_trial.compat.importing.zero_to_fp32",
        *("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"),
        *("convert_zero_checkpoint_to_state_dict", "convert_zero_checkpoint_to_fp32_state_dict"),
    ),
    "deepspeed.ops": {"__compatible_ops__": "zero_trial.compat.deepspeed.deepspeed_config:COMPATIBLE_OPS"},
    "deepspeed.ops.aio": _at("zero_trial.compat.deepspeed.deepspeed_config", "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": _at(
        "zero_trial.compat.deepspeed.deepspeed_config",
        *("OpBuilder", "AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder"),
        *("FusedAdamBuilder", "FusedLambBuilder", "FusedLionBuilder"),
    ),
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": _ADAM["DeepSpeedCPUAdam"]},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": _ADAM["FusedAdam"]},
    "deepspeed.ops.lamb": _LAMB,
    "deepspeed.ops.lamb.fused_lamb": _LAMB,
    "deepspeed.ops.lion": _LION,
    "deepspeed.ops.lion.cpu_lion": {"DeepSpeedCPULion": _LION["DeepSpeedCPULion"]},
    "deepspeed.ops.lion.fused_lion": {"FusedLion": _LION["FusedLion"]},
    "deepspeed.ops.adagrad": _ADAGRAD,
    "deepspeed.ops.adagrad.cpu_adagrad": _ADAGRAD,
}

TABLE: Table = {**REFUSED_MODULES, **OURS}


def install_deepspeed() -> StandInFinder:
    """Make ``import deepspeed`` mean zero_trial, and return the finder that does it. Where the
    real deepspeed is installed its first import raises ConfigError, unless the environment says
    "replace"."""
    return install(_stand_in(asked_for(os.environ)))


def refuse_real_deepspeed(asked: str) -> None:
    """Raise ConfigError where the real deepspeed is installed and ``asked``, the variable's value,
    is not "replace"; nothing is installed."""
    StandInFinder(_stand_in(asked)).refuse_if_installed()


def asked_for(env: Mapping[str, str]) -> str:
    """Return what an environment asks for: "", "1" or "replace". Raises ConfigError for anything
    else."""
    value = env.get(VARIABLE, "")
    if value in ("", "0"):
        return ""
    if value in ("1", "replace"):
        return value
    raise ConfigError("this is not a value of the variable", where=VARIABLE, got=value, expected="0, 1 or replace")


def started_with_stand_in(env: Mapping[str, str], asked: str = "") -> dict[str, str]:
    """Return ``env`` for Pythons that start with the stand-in, and so do those that they start: the
    workers of a DataLoader, ranks of another launcher. ``asked``: "replace", "1", or what ``env``
    says already."""
    start = str(Path(__file__).parents[1] / "start")
    others = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", start)]
    return {**env, VARIABLE: asked or asked_for(env) or "1", "PYTHONPATH": os.pathsep.join([start, *others])}


def pass_on_stand_in() -> None:
    """Let the Pythons that this process starts have the stand-in, too."""
    os.environ.update(started_with_stand_in(os.environ))


def _stand_in(asked: str) -> StandIn:
    fix = f"Uninstall deepspeed, or say {VARIABLE}=replace (zero-trial launch --replace-deepspeed)."
    return StandIn("deepspeed", VERSION, TABLE, asked == "replace", fix)
