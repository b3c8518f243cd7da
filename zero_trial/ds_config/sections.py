"""The inside form of ds_config: one frozen dataclass per section, with the defaults of DeepSpeed 0.19.8.

Numbers of buckets, thresholds and limits are elements, not bytes; dtypes are the strings "fp32", "fp16", "bf16". ``None`` means that the user
said nothing and the component decides. What each key does here, and from which release it comes, stands in the table (``table.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerSection:
    """``optimizer``: a name, any case for DeepSpeed's own and exact case for ``torch.optim``, and its keyword arguments."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulerSection:
    """``scheduler``: WarmupLR and its kin, or a name from ``torch.optim.lr_scheduler``, and its keyword arguments."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fp16Section:
    """``fp16``: half precision with loss scaling; ``loss_scale`` 0 means dynamic."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    fp16_master_weights_and_grads: bool = False


@dataclass(frozen=True)
class Bf16Section:
    """``bf16``: bfloat16 parameters with fp32 master weights."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


@dataclass(frozen=True)
class OffloadOptimizerSection:
    """``zero_optimization.offload_optimizer``: where optimizer state lives between steps."""

    device: str = "none"
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8


@dataclass(frozen=True)
class OffloadParamSection:
    """``zero_optimization.offload_param``: where parameter shards live between uses."""

    device: str = "none"
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


@dataclass(frozen=True)
class LeafModuleSection:
    """``zero_optimization.leaf_module``: modules that are gathered and freed as one unit, by class, name or end of name."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ZeroSection:
    """``zero_optimization``: the ZeRO stage and its sizes."""

    stage: int = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    offload_param: OffloadParamSection | None = None
    offload_optimizer: OffloadOptimizerSection | None = None
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: int = 0
    ignore_unused_parameters: bool = True
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    mics_shard_size: int | None = None
    mics_hierarchical_params_gather: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModuleSection = LeafModuleSection()
    reduce_every: str = "auto"
    reshard_after: str = "auto"


@dataclass(frozen=True)
class DataTypesSection:
    """``data_types``: the dtype of gradient accumulation, parameters and buffers; ``None`` follows the precision mode."""

    grad_accum_dtype: str | None = None
    param_dtype: str | None = None
    buffer_dtype: str | None = None
    keep_in_fp32_modules: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TorchAutocastSection:
    """``torch_autocast``: forward and loss run under torch.autocast; the parameters keep their dtype."""

    enabled: bool = False
    dtype: str | None = None
    lower_precision_safe_modules: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """``activation_checkpointing``: how checkpointed activations are kept."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


@dataclass(frozen=True)
class PipelineSection:
    """``pipeline``: how a pipeline engine runs; the last four are zero_trial's own. ``partition_method`` None is the module's own."""

    seed_layers: bool = False
    activation_checkpoint_interval: int = 0
    pipe_partitioned: bool = True
    grad_partitioned: bool = True
    use_reentrant: bool = True
    schedule: str = "1f1b"
    chunks_per_rank: int | str = "auto"
    zero_policy: str = "auto"
    partition_method: str | None = None


@dataclass(frozen=True)
class ParallelWriteSection:
    """``checkpoint.parallel_write``: who writes the layers of a pipeline."""

    pipeline_stage: bool = False


@dataclass(frozen=True)
class CheckpointSection:
    """``checkpoint``: tag checks and how checkpoints are written."""

    tag_validation: str = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWriteSection = ParallelWriteSection()
    writer: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FlopsProfilerSection:
    """``flops_profiler``: counts the floating-point operations of one step."""

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None
    recompute_fwd_factor: float = 0.0


@dataclass(frozen=True)
class TensorBoardSection:
    """``tensorboard``: scalars as TensorBoard events, written by rank 0."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True)
class CsvMonitorSection:
    """``csv_monitor``: scalars as CSV files, written by rank 0."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True)
class WandbSection:
    """``wandb``: scalars to Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True)
class CometSection:
    """``comet``: scalars to Comet."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclass(frozen=True)
class CommsLoggerSection:
    """``comms_logger``: a count of calls and bytes of every collective."""

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    prof_ops: tuple[str, ...] = ()
    debug: bool = False


@dataclass(frozen=True)
class ThroughputSection:
    """``timers.throughput``: the samples-per-second timer."""

    enabled: bool = True
    synchronized: bool = True


@dataclass(frozen=True)
class TimersSection:
    """``timers``."""

    throughput: ThroughputSection = ThroughputSection()


@dataclass(frozen=True)
class MeshSection:
    """``mesh`` (zero_trial's own): axis sizes; ``None`` is derived from the number of ranks and the ZeRO stage."""

    shard: int | None = None
    replica: int | None = None
    pipe: int = 1
    model: int = 1


@dataclass(frozen=True)
class AioSection:
    """``aio``: reads and writes of state that lives on an NVMe disk."""

    block_size: int = 1048576
    queue_depth: int = 8


@dataclass(frozen=True)
class DsConfig:
    """A whole ds_config after checking; batch sizes stand as given (``solve_batch`` fills them).

    ``sources`` maps every dotted key to where its value came from; ``warnings`` are sentences that the user should read once;
    ``raw`` is the checked input with canonical key names, from which an equal DsConfig can be read again.
    """

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 1.0
    steps_per_print: int | None = None
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Bf16Section()
    zero_optimization: ZeroSection = ZeroSection()
    data_types: DataTypesSection = DataTypesSection()
    torch_autocast: TorchAutocastSection = TorchAutocastSection()
    communication_data_type: str | None = None
    seq_parallel_communication_data_type: str = "fp32"
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    gradient_allreduce_op: str = "mean"
    managed_gradient_accumulation: bool = True
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    pipeline: PipelineSection = PipelineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    flops_profiler: FlopsProfilerSection = FlopsProfilerSection()
    tensorboard: TensorBoardSection = TensorBoardSection()
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    wandb: WandbSection = WandbSection()
    comet: CometSection = CometSection()
    comms_logger: CommsLoggerSection = CommsLoggerSection()
    aio: AioSection = AioSection()
    timers: TimersSection = TimersSection()
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    dataloader_drop_last: bool = False
    disable_python_gc: bool = False
    log_level: str | None = None
    sequence_parallel_size: int | None = None
    data_parallel_size: int | None = None
    comm_timeout_seconds: float = 300.0
    comm_transport: str = "auto"
    mesh: MeshSection = MeshSection()
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
