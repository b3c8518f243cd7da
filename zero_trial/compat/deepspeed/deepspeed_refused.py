"""DeepSpeed's names that zero_trial does not have: why, and what to do instead.

A reason covers a module with all of its submodules, or a few names of a module that is otherwise
there; a name may be a pattern (fnmatch's).
"""

from __future__ import annotations

from zero_trial.compat.finder import Refused

_INSIDE = "it is a part of DeepSpeed's inside; "
_KEYS = "write the key of ds_config as a string (docs/reference/ds_config.md)"
_ENGINE = f"{_INSIDE}initialize() builds the engine with all of its parts"
MOE = "experts are not split between ranks here; experts as plain modules train at every stage, as leaf modules at stage 3"
_SEQUENCE = "sequences are not split between ranks here; use activation checkpointing and a larger ZeRO stage"
_TENSOR_PARALLEL = (
    "there is no automatic tensor parallelism; give initialize(mpu=...) a model that is cut already, or use mesh.model"
)
_INFERENCE = "there is no inference engine; engine.generate() decodes with the model that is trained"
KERNELS = (
    "kernels are built by `python -m zero_trial.ops`; its optimizers are in deepspeed.ops.adam, lamb, lion and adagrad"
)
_CONFIG = "ds_config is read by zero_trial.ds_config.read_ds_config, and engine.config has its values"
_OFFLOAD = "states are offloaded by zero_optimization.offload_optimizer and offload_param"
_MUON = "optimizer.type Muon in ds_config, or zero_trial.ops.optimizers.muon.Muon"
_UNIVERSAL = (
    "checkpoints load on any number of ranks and at any stage as they are; `zero-trial ckpt import` reads DeepSpeed's"
)
_DUALPIPE = "set pipeline.schedule in ds_config: zb_v is the zero-bubble schedule of a V"
_GROUPS = "the axes are set by mesh in ds_config, before initialize()"
_PROFILER = "set flops_profiler in ds_config, or call get_model_profile()"
_LOSS_SCALE = "set fp16 in ds_config; engine.loss_scale is the scale of now"
_FREED = f"{_INSIDE}GatheredParameters gives whole parameters, the safe_get_* functions their values"
_DEVICE = "zero_trial trains on CPUs and CUDA"
_TIMERS = "set wall_clock_breakdown in ds_config"
_MONITORS = (
    "set tensorboard, wandb, comet or csv_monitor in ds_config; MonitorMaster and engine.monitor.write_events() write"
)
_CHECKPOINTING = f"{_INSIDE}checkpoint() and configure() are here"

REFUSED_MODULES: dict[str, Refused] = {
    module: Refused(reason)
    for reason, modules in {
        "`zero-trial tune` is the autotuner: a command over an experiment, which reads ds_config's autotuning section": [
            "autotuning"
        ],
        "there is no model compression": ["compression.compress", "compression.scheduler"],
        "models are compiled by engine.compile(), as with DeepSpeed's compile section": ["compile", "runtime.compiler"],
        "checkpoints are written by engine.save_checkpoint(), with no other engine to choose": [
            *("datastates", "runtime.checkpoint_engine", "runtime.model_checkpointing", "io"),
        ],
        _INFERENCE: [
            *("inference", "model_implementations", "runtime.hybrid_engine", "runtime.hybrid_engine_graph"),
            *("runtime.rollout", "utils.static_cache"),
        ],
        _TENSOR_PARALLEL: ["module_inject", "runtime.tensor_parallel", "runtime.domino"],
        "there is no LoRA of its own; PEFT's adapters train at every stage": ["linear"],
        MOE: ["moe", "checkpoint.autoep_affine", "checkpoint.autoep_universal", "checkpoint.autoep_zero3_metadata"],
        "it measures DeepSpeed's NVMe library; `zero-trial check` measures the path of offload_*.nvme_path": ["nvme"],
        _SEQUENCE: ["sequence", "runtime.sequence_parallel"],
        KERNELS: [
            *("ops.transformer", "ops.triton_ops", "ops.fp_quantizer", "ops.gds"),
            *("ops.compile", "ops.deepspeed4science", "ops.random_ltd", "ops.quantizer", "ops.pin_memory"),
            *("ops.adam.multi_tensor_apply", "ops.lion.multi_tensor_apply", "ops.adam.zenflow_cpu_adam"),
            "ops.adam.zenflow_torch_adam",
        ],
        "there is no curriculum and no token dropping; write a data loader or sampler": ["runtime.data_pipeline"],
        _OFFLOAD: [
            *("runtime.swap_tensor", "runtime.zenflow", "runtime.superoffload"),
            *("utils.pin_memory", "utils.pin_memory_tracker", "runtime.zero.contiguous_memory_allocator"),
        ],
        "launch with `zero-trial launch --as-deepspeed script.py`, which takes DeepSpeed's options": [
            *("launcher.launch", "launcher.launcher_helper", "launcher.multinode_runner", "launcher.constants"),
        ],
        "processes are bound to cores by taskset or numactl around the command": ["utils.numa"],
        _UNIVERSAL: [
            *("checkpoint.affine", "checkpoint.affine_transfer", "checkpoint.constants", "checkpoint.ds_to_universal"),
            *("checkpoint.deepspeed_checkpoint", "checkpoint.reshape_3d_utils", "checkpoint.reshape_meg_2d"),
            *("checkpoint.reshape_utils", "checkpoint.universal_checkpoint", "checkpoint.zero_checkpoint"),
            *("utils.zero_to_torch", "runtime.state_dict_factory"),
        ],
        "torch.distributed is the only backend": [
            *("comm.backend", "comm.ccl", "comm.mori", "comm.torch", "comm.pg_utils", "comm.constants", "comm.config"),
            *("runtime.comm", "runtime.sparse_tensor"),
        ],
        _DEVICE: [
            f"accelerator.{kind}_accelerator" for kind in ("hpu", "klxpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu")
        ],
        _MONITORS: [f"monitor.{name}" for name in ("comet", "csv_monitor", "tensorboard", "utils", "wandb")],
        "the versions are in `zero-trial env`": ["env_report", "git_version_info_installed"],
        f"{_INSIDE}scripts use Python's inspect": ["compat"],
        _PROFILER: ["profiling.config", "profiling.constants"],
        _CONFIG: [
            *("runtime.config_utils", "runtime.activation_checkpointing.config", "utils.config"),
        ],
        "set activation_checkpointing.cpu_checkpointing in ds_config": [
            "runtime.activation_checkpointing.offload_activations"
        ],
        _LOSS_SCALE: ["runtime.fp16.loss_scaler"],
        "cut the logits in the model's loss": ["runtime.chunked_cross_entropy"],
        "set torch_autocast in ds_config, or call torch.autocast": ["runtime.torch_autocast", "runtime.keep_in_fp32"],
        _DUALPIPE: ["runtime.pipe.dualpipev"],
        f"{_INSIDE}torch.distributed sends and receives": ["runtime.pipe.p2p"],
        "Python's collector is paused during steps without it": ["runtime.python_gc"],
        "weights are not quantized": ["runtime.weight_quantizer"],
        _MUON: ["runtime.zero.muon"],
        _FREED: [
            *("runtime.zero.linear", "runtime.zero.parameter_offload", "runtime.zero.partitioned_param_coordinator"),
            *("runtime.zero.partitioned_param_profiler", "utils.mixed_precision_linkage"),
        ],
        "it is a test of DeepSpeed's": ["runtime.zero.test"],
        "it is not in DeepSpeed 0.19.8 either; torch's scaled_dot_product_attention takes masks": [
            "ops.sparse_attention"
        ],
        "it is not in DeepSpeed 0.19.8 either; `zero-trial launch --nnodes LEAST:MOST` is elastic": ["elasticity"],
        "it is not in DeepSpeed 0.19.8 either; engine.save_checkpoint() writes": ["nebula"],
        _GROUPS: ["utils.bwc"],
        f"{_INSIDE}set ZERO_TRIAL's log level by logging.getLogger('zero_trial')": ["utils.debug"],
        "it warns of names that DeepSpeed no longer has": ["utils.exceptions"],
        "transformer kernels are not here; torch.nn's modules train": ["utils.types"],
    }.items()
    for module in (f"deepspeed.{name}" for name in modules)
}
"""Module -> why it and its submodules are refused."""

REFUSED_NAMES: dict[str, dict[str, str]] = {
    "deepspeed": {
        _CONFIG: "load_ds_config",
        "engine.deepspeed_io() makes loaders": "DeepSpeedDataLoader",
        _INFERENCE: "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference",
        KERNELS: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        _DUALPIPE: "DualPipeVEngine DualPipeVModule",
        _MUON: "MUON_OPTIMIZER KV MLA_KV MLA_Q NOT_HEAD_BLOCKED QUERY resolve_per_head_muon_after_sharding set_optimizer_flags",
        _TENSOR_PARALLEL: "merge_tp_model_init_into_config record_tp_model_init_args replace_transformer_layer "
        "set_autotp_mode tp_model_init",
    },
    "deepspeed.accelerator": {_DEVICE: "set_accelerator"},
    "deepspeed.accelerator.cpu_accelerator": {_DEVICE: "oneccl_imported_p"},
    "deepspeed.accelerator.cuda_accelerator": {"import the package itself": "nvtx pynvml"},
    "deepspeed.accelerator.real_accelerator": {
        _DEVICE: "SUPPORTED_ACCELERATOR_LIST accel_logger ds_accelerator dsa1 dsa2 set_accelerator"
    },
    "deepspeed.checkpoint": {
        _UNIVERSAL: "[A-Z]* enable_universal_checkpoint get_model_3d_descriptor merge_state model_3d_desc "
        "reshape_meg_2d_parallel",
    },
    "deepspeed.comm": {
        "torch.distributed is the only backend": "*_BACKEND DEFAULT_AML_* CCLBackend TorchBackend "
        "ccl_backend cdb hccl_backend mpi_backend nccl_backend "
        "init_deepspeed_backend set_backend has_all_reduce_coalesced has_coalescing_manager all_gather_coalesced "
        "all_reduce_coalesced enable_symm_mem_for_group",
        "set comms_logger in ds_config; log_summary() and engine.comms_summary() have calls and bytes": "COMMS_LOGGER* CommsLogger comms_logger "
        "configure get_comm_operation_count get_debug_log_name get_default_args get_logged_comm_ops "
        "get_msg_size_from_args get_tensor_kwarg get_tensor_position has_comm_data reset_log timed_op timer_summary "
        "timers",
        "init_distributed() reads the variables of MPI and of clusters": "in_aml in_aws_sm in_dlts mpi_discovery "
        "patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend",
    },
    "deepspeed.comm.utils": {
        "set comms_logger in ds_config": "get_debug_log_name get_default_args get_msg_size_from_args get_tensor_kwarg "
        "get_tensor_position"
    },
    "deepspeed.constants": {_INFERENCE: "INFERENCE_GENERIC_MODE INFERENCE_SPECIALIZED_MODE"},
    "deepspeed.git_version_info": {"there is no build of DeepSpeed": "accelerator_name installed_ops torch_info"},
    "deepspeed.launcher.runner": {
        "launch with `zero-trial launch --as-deepspeed script.py`, which takes DeepSpeed's options": "main parse_args "
        "DEEPSPEED_ENVIRONMENT_PATHS DLTS_HOSTFILE EXCLUDE_ENVS EXPORT_ENVS LAUNCHER_CLASSES PDSH_MAX_FAN_OUT "
        "apply_num_nodes_and_gpus encode_world_info fetch_hostfile parse_inclusion_exclusion parse_node_config "
        "parse_node_config_list parse_resource_filter run_autotuning",
    },
    "deepspeed.monitor.config": {_MONITORS: "[A-Z]*"},
    "deepspeed.ops": {KERNELS: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"},
    "deepspeed.ops.op_builder": {KERNELS: "*"},
    "deepspeed.ops.adam": {_OFFLOAD: "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"},
    "deepspeed.ops.adam.fused_adam": {KERNELS: "multi_tensor_applier"},
    "deepspeed.ops.lion.fused_lion": {KERNELS: "multi_tensor_applier"},
    "deepspeed.pipe": {_DUALPIPE: "DualPipeVModule"},
    "deepspeed.profiling.flops_profiler": {
        _PROFILER: "DEFAULT_PRECISION MODULE_HOOK_MAPPING Tensor get_module_duration get_module_flops get_module_macs "
        "module_flop_count module_mac_count old_functions wrapFunc"
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        _CHECKPOINTING: "CONTIGUOUS_CHECKPOINTING CPU_CHECKPOINT CheckpointFunction PARTITION_ACTIVATIONS PROFILE_TIME "
        "SYNCHRONIZE contiguous_data_buffers contiguous_size_buffers data_offsets deepspeed_checkpointing_enabled "
        "detach_variable extract_tensors gather_partitioned_activations get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward get_partition_size get_partition_start "
        "get_partitioned_activations_for_backward is_activation_to_checkpoint merge_tensors mp_group mp_rank mp_size "
        "mpu num_layers partition_activations restore_offloaded_activations size_offsets timers",
        "call model_parallel_cuda_manual_seed": "model_parallel_reconfigure_tp_seed",
    },
    "deepspeed.runtime.base_optimizer": {_ENGINE: "BackwardHookStateManager"},
    "deepspeed.runtime.bf16_optimizer": {_ENGINE: "print_rank_0"},
    "deepspeed.runtime.config": {
        _CONFIG: "get_* DeepSpeedConfigWriter DtypeEnum HybridEngineConfig",
        _KEYS: "[A-Z]*_* EXPERT_PARALLEL",
    },
    "deepspeed.runtime.constants": {_KEYS: "[A-Z]*"},
    "deepspeed.runtime.dataloader": {"engine.deepspeed_io() makes loaders": "DeepSpeedDataLoader"},
    "deepspeed.runtime.engine": {
        _ENGINE: "APEX_INSTALLED CASTABLE_DTYPES EngineTimers MEMORY_OPT_ALLREDUCE_SIZE split_half_float_double_sparse"
    },
    "deepspeed.runtime.fp16.fused_optimizer": {_TIMERS: "*_TIMER *_TIMERS"},
    "deepspeed.runtime.lr_schedules": {
        "give the schedule in ds_config or as an object": "get_torch_optimizer override_1cycle_params "
        "override_lr_range_test_params override_params override_warmupCosineLR_params override_warmupLR_params "
        "parse_arguments update_lr",
    },
    "deepspeed.runtime.pipe.engine": {
        _ENGINE: "*_TIMER DATA_PARALLEL_ID LOG_STAGE TARGET_ID TENSOR_META_SIZE is_even mem_alloced mem_cached"
    },
    "deepspeed.runtime.pipe.schedule": {
        "set pipeline.schedule in ds_config to run another schedule": "CommitP2P DualPipeVSchedule"
    },
    "deepspeed.runtime.precision_config": {_KEYS: "BFLOAT16* FP16*"},
    "deepspeed.runtime.pipe.module": {"zero_trial.errors.ConfigError is raised": "PipelineError"},
    "deepspeed.runtime.utils": {
        "engine.was_step_applied() and engine.skipped_steps say it": "CheckOverflow",
        _ENGINE: "OutputBackwardHookManager PartitionedTensor TLinear align_dense_tensors all_gather_dp_groups "
        "all_gather_into_tensor_dp_groups check_internal_apis_for_count_used_parameters combine_grad_norm_groups "
        "compare_tensors_in_structures count_used_parameters_in_backward get_checkpoint_folder_size get_grad_zeros "
        "get_inactive_params is_optimized_parameter is_transformers_cache mask_nan_or_inf_with_val_inplace "
        "maybe_loss_for_backward mem_alloced mem_cached register_output_backward_hooks",
        MOE: "get_norm_with_moe_layers get_norm_with_moe_layers_fast",
        _OFFLOAD: "offload_adam_states reload_adam_states",
    },
    "deepspeed.runtime.zero": {
        _FREED: "DeepSpeedTensorOverride DeepSpeedZeRoOffload ZeroParamType",
    },
    "deepspeed.runtime.zero.config": {
        _CONFIG: "ZERO_FORMAT ZERO_OPTIMIZATION get_zero_config read_zero_config_deprecated"
    },
    "deepspeed.runtime.zero.offload_states": {
        "engine.offload_states() moves states of the engine": "offload_adam_states offload_optimizer_states "
        "reload_adam_states reload_optimizer_states unpin_offloaded_optimizer_states",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        _FREED: "AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle CUDAQuantizer "
        "DEFAULT_TENSOR_OVERRIDES DS_Z3_EAGER_FALLBACK_OWNER_ATTR DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR "
        "DeepSpeedTensorOverride InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles "
        "NoGatherCoalescedHandle NoGatherHandle QuantizationInfo ZeroParamType debug_rank0 empty_buffers free_param "
        "get_all_subclasses get_allgather_dtype get_new_tensor_fn_for_dtype partitioned_param_data_shape print_rank_0 "
        "restore_init_context reuse_buffers shutdown_init_context temp_contiguous_tensor top_level_context "
        "zero_init_context",
    },
    "deepspeed.runtime.zero.stage3": {
        _ENGINE: "INITIAL_MICRO_STEP_ID INIT_OPTIMIZER_TIMER IPGBucketZ3 "
        "OPTIMIZER_STEP_TIMER OPTIMIZER_SWAP_IN_STATE_TIMER OPTIMIZER_SWAP_OUT_STATE_TIMER input isclose lcm "
        "model_to_params move_to_cpu pg_correctness_test print_rank_0",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        _ENGINE: "GradPartitionBufferGroup INITIAL_MICRO_STEP_ID IPGBucket "
        "OPTIMIZER_ALLGATHER_TIMER OPTIMIZER_GRADIENTS_TIMER OPTIMIZER_STEP_TIMER OPTIMIZER_TIMERS "
        "get_alignment_padding input isclose lcm model_to_params pg_correctness_test print_rank_msg "
        "split_half_float_double",
    },
    "deepspeed.runtime.zero.tiling": {"TiledLinear splits its input itself": "split_tensor_along_last_dim"},
    "deepspeed.runtime.zero.utils": {
        _FREED: "apply_to_tensors_only is_builtin_type is_zero_param isinstance_namedtuple get_norm_dtype",
        "every torch.optim.Optimizer is taken at every stage": "ZERO_SUPPORTED_OPTIMIZERS is_zero_supported_optimizer",
        _ENGINE: "assert_ints_same_as_other_ranks assert_lst_len_same_as_other_ranks defragment "
        "get_lst_from_rank0 get_mapping_to_flat_buffer warned",
    },
    "deepspeed.utils": {
        MOE: "expert_tensor_parallel_world_size",
        _FREED: "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping link_hp_params "
        "lazy_init_hp_params_optimizer_state map_to_flat_opt_states set_full_hp_grad set_full_hp_param",
        "processes are bound to cores by taskset or numactl around the command": "get_numactl_cmd",
        _GROUPS: "get_tensor_model_parallel_src_rank initialize mesh_device mpu set_tensor_model_parallel_rank "
        "set_tensor_model_parallel_world_size",
    },
    "deepspeed.utils.comms_logging": {
        "set comms_logger in ds_config; engine.comms_summary() has calls and bytes": "CommsLogger calc_bw_log "
        "convert_size print_rank_0"
    },
    "deepspeed.utils.groups": {
        MOE: "expert_tensor_parallel_world_size",
        _GROUPS: "get_tensor_model_parallel_src_rank initialize mesh_device mpu set_tensor_model_parallel_rank "
        "set_tensor_model_parallel_world_size",
    },
    "deepspeed.utils.logging": {
        "use Python's logging": "LoggerFactory print_json_dist",
        _CONFIG: "print_configuration",
    },
    "deepspeed.utils.nvtx": {"ranges are always named": "DEEPSPEED_NVTX_DOMAIN enable_nvtx"},
    "deepspeed.utils.tensor_fragment": {
        _FREED: "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping map_to_flat_opt_states "
        "set_full_hp_grad set_full_hp_param tensor_fragment"
    },
    "deepspeed.utils.timer": {_TIMERS: "*_TIMER CudaEventTimer PSUTILS_INSTALLED"},
    "deepspeed.utils.torch": {"call torch itself": "is_functorch_transforming jit_script_compat register_grad_hook"},
    "deepspeed.utils.z3_leaf_module": {
        "set zero_optimization.leaf_module in ds_config": "apply_zero_leaf_module_config"
    },
    "deepspeed.utils.zero_to_fp32": {
        "the four functions that return or write state dicts are here": "GatheredTensor OUTPUT_DTYPE_NAMES args atoi "
        "debug device get_checkpoint_files get_model_state_file get_model_state_files get_optim_files natural_keys "
        "parse_model_states parse_optim_states parser to_torch_tensor zero3_partitioned_param_info zero_model_state",
    },
}
"""Module -> why -> the names of it that are refused; its other names are answered."""

REFUSED_NAMES["deepspeed.comm.comm"] = REFUSED_NAMES["deepspeed.comm"]
REFUSED_NAMES["deepspeed.profiling.flops_profiler.profiler"] = REFUSED_NAMES["deepspeed.profiling.flops_profiler"]


def refused_names(module: str) -> dict[str, str]:
    """Return the names of ``module`` that are refused one by one, with the reasons."""
    return {name: reason for reason, names in REFUSED_NAMES.get(module, {}).items() for name in names.split()}
