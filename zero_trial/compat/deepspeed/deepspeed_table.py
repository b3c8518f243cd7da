"""Maps DeepSpeed's modules and names to the objects that ``import deepspeed`` provides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zero_trial.compat.finder import Refused, StandIn, StandInFinder, Table, install
from zero_trial.errors import ConfigError

VERSION = "0.19.8"
"""The version of DeepSpeed that these names are from."""

VARIABLE = "ZERO_TRIAL_AS_DEEPSPEED"
"""Environment variable that installs the stand-in: 1, or "replace" where DeepSpeed is installed."""


# --- refused names: a module includes all of its submodules ---------------------------------------

MOE = "expert parallelism is not supported; experts as plain modules train at every stage, as leaf modules at stage 3"

REFUSED_MODULES: dict[str, Refused] = {
    f"deepspeed.{module}": Refused(reason)
    for reason, modules in {
        "use `zero-trial tune`, which tunes an experiment": ["autotuning"],
        "model compression is not supported": ["compression"],
        "use engine.generate(), which decodes with the model in training; there is no inference engine": [
            *("inference", "init_inference", "InferenceEngine", "runtime.hybrid_engine"),
        ],
        "automatic tensor parallelism is not supported; pass a partitioned model with initialize(mpu=...), or set mesh.model": [
            *("module_inject", "tp_model_init", "runtime.tensor_parallel"),
        ],
        "use PEFT's LoRA adapters, which train at every stage": ["linear"],
        MOE: ["moe.layer", "moe.experts", "moe.sharded_moe", "moe.mappings"],
        "sequence parallelism is not supported; use activation checkpointing and a higher ZeRO stage": [
            *("sequence", "runtime.sequence_parallel"),
        ],
        "kernels are built at their first use; the optimizers are in deepspeed.ops.adam, lamb, lion and adagrad": [
            *("ops.op_builder", "ops.aio", "ops.transformer", "ops.sparse_attention"),
        ],
        "use `zero-trial plan`, which shows the memory that a model needs": [
            f"runtime.zero.{module}.estimate_{stage}_model_states_mem_needs{kind}"
            for module, stage in (("stage_1_and_2", "zero2"), ("stage3", "zero3"))
            for kind in ("", "_all_live", "_all_cold")
        ],
        "curriculum learning and token dropping are not supported; write a data loader or sampler": [
            "runtime.data_pipeline"
        ],
        "checkpoints load at any stage on any number of ranks; `zero-trial ckpt import` reads DeepSpeed's": [
            *("checkpoint.ds_to_universal", "checkpoint.deepspeed_checkpoint", "runtime.state_dict_factory"),
        ],
        "set pipeline.schedule in ds_config to select a schedule": ["runtime.pipe.schedule"],
        "set wall_clock_breakdown in ds_config": ["utils.timer"],
        "use `zero-trial launch --nnodes MIN:MAX` for an elastic run": ["elasticity"],
    }.items()
    for module in modules
}
"""Module or name -> why it and everything under it is refused, and what to do instead. Any other
name that is not in the table is refused with one sentence and the nearest name."""


# --- names that are in several modules ------------------------------------------------------------


def _at(place: str, *names: str) -> dict[str, str]:
    """Return names that are the same in our module ``place``."""
    return {name: f"{place}:{name}" for name in names}


def _ours(module: str, *names: str) -> dict[str, str]:
    """Return names that are the same in a module of this folder."""
    return _at(f"zero_trial.compat.deepspeed.{module}", *names)


_ENGINE = {
    "DeepSpeedEngine": "zero_trial.engine:Engine",
    "PipelineEngine": "zero_trial.engine.pipeline_engine:PipelineEngine",
}
_PIPE = _at("zero_trial.pipeline", "PipelineModule", "LayerSpec", "TiedLayerSpec")
_TOPOLOGY = {
    **_at("zero_trial.pipeline", "ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"),
    **_at("zero_trial.engine.compat", "PipelineParallelGrid"),
}
_ZERO = _at("zero_trial.zero", "Init", "GatheredParameters", "register_external_parameter")
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
_ACCELERATOR = _ours("accelerator", "get_accelerator")
_STATUS = _at("zero_trial.sharding.guards.freed", "ZeroParamStatus")
# The type that initialize() returns, for isinstance.
_OPTIMIZER = {"DeepSpeedOptimizer": "zero_trial.sharding.optimizer:ShardedOptimizer"}
_CONFIG = {
    "DeepSpeedConfig": "zero_trial.engine.compat:DeepSpeedConfig",
    "DeepSpeedConfigError": "zero_trial.errors:ConfigError",
}
_COMM = {
    **_at(
        "torch.distributed",
        *("ReduceOp", "ProcessGroup", "P2POp", "is_available", "destroy_process_group", "new_group"),
        *("get_rank", "get_world_size", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier"),
        *("all_to_all_single", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend"),
        *("monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    ),
    **_ours(
        "deepspeed_comm",
        *("init_distributed", "is_initialized", "all_gather_into_tensor", "get_local_rank", "log_summary"),
        *("get_all_ranks_from_group", "get_global_rank", "get_world_group"),
    ),
}
_LOG = _ours("deepspeed_utils", "logger", "log_dist")
_DATA_GROUPS = ("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size")
_MODEL_GROUPS = ("get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size")
_GROUPS = {
    **_ours("deepspeed_comm", *_DATA_GROUPS, *_MODEL_GROUPS),
    **{name.replace("get_", "get_tensor_"): _ours("deepspeed_comm", name)[name] for name in _MODEL_GROUPS},
}
# Names with an underscore that Hugging Face's libraries use.
_INNER_GROUPS = {
    f"_{name}": target
    for name, target in _ours(
        "deepspeed_comm",
        *(*_DATA_GROUPS, *_MODEL_GROUPS[1:], "get_sequence_parallel_world_size", "get_sequence_parallel_rank"),
        *("get_sequence_parallel_group", "get_expert_parallel_group_dict"),
    ).items()
}
_CHECKPOINTING = _at(
    "zero_trial.activation_checkpointing",
    *("checkpoint", "configure", "get_cuda_rng_tracker", "is_configured", "model_parallel_cuda_manual_seed"),
    *("partition_activations_in_checkpoint", "reset", "set_num_layers"),
) | {
    "CudaRNGStatesTracker": "zero_trial.activation_checkpointing:RngStatesTracker",
    "non_reentrant_checkpoint": "zero_trial.activation_checkpointing:checkpoint",
}
_PROFILER = _ours("deepspeed_utils", "get_model_profile", "FlopsProfiler")
_LOADERS = _at("zero_trial.engine", "RepeatingLoader")
_ADAM = {"FusedAdam": "zero_trial.ops:FusedAdam", "DeepSpeedCPUAdam": "zero_trial.ops:CPUAdam"}
_LAMB = _at("zero_trial.ops", "FusedLamb")
_LION = {"FusedLion": "zero_trial.ops:FusedLion", "DeepSpeedCPULion": "zero_trial.ops:FusedLion"}
_ADAGRAD = {"DeepSpeedCPUAdagrad": "zero_trial.ops:FusedAdagrad"}

_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")

# --- the table ------------------------------------------------------------------------------------

OURS: dict[str, dict[str, str]] = {
    "deepspeed": {
        **_ENGINE,
        **_OPTIMIZER,
        **_CONFIG,
        **_ACCELERATOR,
        **_LOG,
        **_at("zero_trial.comm", "init_distributed"),
        **_at("zero_trial.engine", "initialize", "add_config_arguments"),
        **_at("zero_trial.zero", "OnDevice"),
        "__version__": "zero_trial.compat.deepspeed.deepspeed_table:VERSION",
        "PipelineModule": "zero_trial.pipeline:PipelineModule",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "dist": "deepspeed.comm",
        "zero": "deepspeed.runtime.zero",
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.checkpoint.utils": _ours("deepspeed_utils", "clone_tensors_for_torch_save"),
    "deepspeed.comm": {**_COMM, **_ACCELERATOR, **_ours("deepspeed_utils", "default_pg_timeout")},
    "deepspeed.comm.comm": _COMM,
    "deepspeed.launcher.runner": _ours("deepspeed_utils", "DEEPSPEED_ENVIRONMENT_NAME"),
    "deepspeed.moe.utils": _ours(
        "deepspeed_utils",
        *("has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"),
    ),
    "deepspeed.monitor.config": _ours("deepspeed_utils", "get_monitor_config"),
    "deepspeed.monitor.monitor": _ours("deepspeed_utils", "MonitorMaster"),
    "deepspeed.ops.adagrad": _ADAGRAD,
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": _ADAM["DeepSpeedCPUAdam"]},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": _ADAM["FusedAdam"]},
    "deepspeed.ops.lamb": _LAMB,
    "deepspeed.ops.lion": _LION,
    "deepspeed.pipe": _PIPE,
    "deepspeed.profiling.flops_profiler": _PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILER,
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": {**_OPTIMIZER, "ZeROOptimizer": _OPTIMIZER["DeepSpeedOptimizer"]},
    "deepspeed.runtime.bf16_optimizer": _at("zero_trial.engine.compat", "BF16_Optimizer"),
    "deepspeed.runtime.config": _CONFIG,
    "deepspeed.runtime.dataloader": _LOADERS,
    "deepspeed.runtime.engine": {"DeepSpeedEngine": _ENGINE["DeepSpeedEngine"]},
    "deepspeed.runtime.fp16.fused_optimizer": _at("zero_trial.engine.compat", "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": _at("zero_trial.engine.compat", "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.lr_schedules": _at(
        "zero_trial.engine.lr_schedules",
        *("LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
    ),
    "deepspeed.runtime.pipe": {**_PIPE, "ProcessTopology": _TOPOLOGY["ProcessTopology"]},
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": _ENGINE["PipelineEngine"]},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.utils": {
        **_at("torch.nn.utils", "clip_grad_norm_"),
        **_ours("deepspeed_utils", "move_to_device", "see_memory_usage", "set_random_seed"),
    },
    "deepspeed.runtime.zero": {
        **_ZERO,
        **_STATUS,
        **_at("zero_trial.zero", "TiledLinear", "TiledLinearReturnBias", "unwrap_model_for_generation"),
    },
    "deepspeed.runtime.zero.config": _ours("deepspeed_utils", "ZeroStageEnum"),
    "deepspeed.runtime.zero.offload_config": _ours("deepspeed_utils", "OffloadDeviceEnum", "OffloadStateTypeEnum"),
    "deepspeed.runtime.zero.offload_states": _ours("deepspeed_utils", "get_state_devices"),
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        **_STATUS,
        **_ACCELERATOR,
        "unregister_external_parameter": "zero_trial.zero:unregister_external_parameter",
        # transformers patches the first around zero.Init, and compares with the second
        **_ours("deepspeed_utils", "zero_wrapper_for_fp_tensor_constructor"),
        **{f"_orig_torch_{name}": f"torch:{name}" for name in _CONSTRUCTORS},
    },
    "deepspeed.runtime.zero.stage3": {
        **_at("zero_trial.engine.compat", "DeepSpeedZeroOptimizer_Stage3"),
        **_at("zero_trial.zero", "unwrap_model_for_generation"),
    },
    "deepspeed.runtime.zero.stage_1_and_2": _at("zero_trial.engine.compat", "DeepSpeedZeroOptimizer"),
    "deepspeed.runtime.zero.tiling": _at("zero_trial.zero", "TiledLinear", "TiledLinearReturnBias"),
    "deepspeed.utils": {**_at("zero_trial.zero", "OnDevice"), **_FRAGMENTS, **_LEAVES, **_LOADERS, **_LOG, **_GROUPS},
    "deepspeed.utils.groups": {**_GROUPS, **_INNER_GROUPS},
    "deepspeed.utils.init_on_device": _at("zero_trial.zero", "OnDevice"),
    "deepspeed.utils.logging": _LOG,
    "deepspeed.utils.tensor_fragment": _FRAGMENTS,
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": _at(
        "zero_trial.compat.importing.zero_to_fp32",
        *("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"),
        "convert_zero_checkpoint_to_fp32_state_dict",
    ),
}

TABLE: Table = {**REFUSED_MODULES, **OURS}


def install_deepspeed() -> StandInFinder:
    """Make ``import deepspeed`` import zero_trial, and return the finder that does it. If DeepSpeed
    itself is installed, its first import raises ConfigError unless the environment variable is
    "replace"."""
    return install(_stand_in(asked_for(os.environ)))


def refuse_real_deepspeed(asked: str) -> None:
    """Raise ConfigError if DeepSpeed itself is installed and ``asked``, the variable's value, is
    not "replace". Installs no finder."""
    StandInFinder(_stand_in(asked)).refuse_if_installed()


def asked_for(env: Mapping[str, str]) -> str:
    """Return the setting in ``env``: "", "1" or "replace". Raises ConfigError if invalid."""
    value = env.get(VARIABLE, "")
    if value in ("", "0"):
        return ""
    if value in ("1", "replace"):
        return value
    raise ConfigError(
        "invalid value of the environment variable", where=VARIABLE, got=value, expected="0, 1 or replace"
    )


def started_with_stand_in(env: Mapping[str, str], asked: str = "") -> dict[str, str]:
    """Return ``env`` for Python processes that use the stand-in, as do their child processes
    (DataLoader workers, ranks of another launcher). ``asked``: "replace" or "1"; by default the
    value in ``env``."""
    start = str(Path(__file__).parents[1] / "start")
    others = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", start)]
    return {**env, VARIABLE: asked or asked_for(env) or "1", "PYTHONPATH": os.pathsep.join([start, *others])}


def pass_on_stand_in() -> None:
    """Enable the stand-in in Python processes that this process starts."""
    os.environ.update(started_with_stand_in(os.environ))


def _stand_in(asked: str) -> StandIn:
    fix = f"Uninstall deepspeed, or set {VARIABLE}=replace (zero-trial launch --replace-deepspeed)."
    return StandIn("deepspeed", VERSION, TABLE, asked == "replace", fix)
