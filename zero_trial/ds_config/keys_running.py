"""ds_config keys: printing, monitors, checkpoints, activations, pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from zero_trial.ds_config.key import Origin, mapped, no_effect, ours, refused, section, supported
from zero_trial.schema.types import AnyOf, Bool, Float, Int, MapOf, Names, Text

_FOLDER = (
    "written to output_path/job_name; without an output path, to a folder named after the section where the run started"
)
_TO_WANDB = "passed to wandb.init; team is its entity"
_TO_COMET = "passed to comet_ml.start"
_TO_TRACKIO = "passed to trackio.init"
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "mlflow", "trackio")
"""The sections that write scalars."""

SCHEDULE_CHUNKS: Mapping[str, int | None] = MappingProxyType(
    {"1f1b": 1, "gpipe": 1, "interleaved": None, "looped_bfs": None, "zb_h1": 1, "zb_v": 2}
)
"""Schedule -> chunks per rank; None where they can be chosen."""

SCHEDULE_SYNONYMS: tuple[tuple[str, str], ...] = (
    ("zero_bubble", "zb_h1"),
    ("zbh1", "zb_h1"),
    ("zb-h1", "zb_h1"),
    ("zbv", "zb_v"),
    ("zb-v", "zb_v"),
    ("ZBVZeroBubble", "zb_v"),
    ("interleaved_1f1b", "interleaved"),
    ("Interleaved1F1B", "interleaved"),
    ("LoopedBFS", "looped_bfs"),
    ("breadth_first", "looped_bfs"),
)

LIFETIMES = ("hold", "chunk", "free")
"""Of gathered parameters."""

REDUCTIONS = ("boundary", "micro")
"""When gradients are reduced."""

ZERO_POLICIES = ("auto", *LIFETIMES, *REDUCTIONS)

RESHARDS: Mapping[str, str] = MappingProxyType({"step": "hold", "forward": "free"})
"""``zero_optimization.reshard_after`` in the words of a pipeline."""


@dataclass(frozen=True)
class MonitorFileSection:
    """``tensorboard`` and ``csv_monitor``: scalars in files, written by rank 0."""

    enabled: bool = supported(False, Bool(), "enables it")
    output_path: str = supported("", Text(), _FOLDER)
    job_name: str = supported("DeepSpeedJobName", Text(), _FOLDER)


@dataclass(frozen=True)
class WandbSection:
    """``wandb``: scalars to Weights & Biases."""

    group: str | None = supported(None, Text(), _TO_WANDB)
    team: str | None = supported(None, Text(), _TO_WANDB)
    project: str = supported("deepspeed", Text(), _TO_WANDB)
    enabled: bool = supported(False, Bool(), "see wandb")


@dataclass(frozen=True)
class CometSection:
    """``comet``: scalars to Comet."""

    enabled: bool = supported(False, Bool(), "see comet")
    samples_log_interval: int = supported(100, Int(1), "an event of each name is sent once per this number of samples")
    experiment_name: str | None = supported(None, Text(), "name of the experiment")
    project: str | None = supported(None, Text(), _TO_COMET)
    workspace: str | None = supported(None, Text(), _TO_COMET)
    api_key: str | None = supported(None, Text(), _TO_COMET)
    experiment_key: str | None = supported(None, Text(), _TO_COMET)
    online: bool | None = supported(None, Bool(), _TO_COMET)
    mode: str | None = supported(None, Text(("get_or_create", "create", "get")), _TO_COMET)


@dataclass(frozen=True)
class MlflowSection:
    """``mlflow``: scalars to MLflow."""

    enabled: bool = ours(False, Bool(), "see mlflow")
    tracking_uri: str | None = ours(None, Text(), "a server or a folder; null means MLflow's own setting")
    experiment_name: str = ours("zero_trial", Text(), "name of the experiment; it is created if it does not exist")
    run_name: str | None = ours(None, Text(), "name of the run")


@dataclass(frozen=True)
class TrackioSection:
    """``trackio``: scalars to trackio."""

    enabled: bool = ours(False, Bool(), "see trackio")
    project: str = ours("zero_trial", Text(), _TO_TRACKIO)
    name: str | None = ours(None, Text(), _TO_TRACKIO)
    space_id: str | None = ours(None, Text(), _TO_TRACKIO)


@dataclass(frozen=True)
class FlopsProfilerSection:
    """``flops_profiler``: counts the floating-point operations of one step."""

    enabled: bool = supported(False, Bool(), "see flops_profiler")
    profile_step: int = supported(
        1, Int(1), "global_steps at which a micro-batch is timed; a micro-batch of the step before is counted"
    )
    module_depth: int = supported(-1, Int(-1), "how deep modules are listed; -1 means all")
    top_modules: int = supported(1, Int(1), "how many kinds of modules are listed per depth")
    detailed: bool = supported(True, Bool(), "the tree of modules is printed, too")
    output_file: str | None = supported(None, Text(), "the report goes into this file instead of the log")
    recompute_fwd_factor: float = supported(
        0.0,
        Float(low=0),
        "fraction of the forward pass that backward recomputes: included in the operations, and excluded from MFU",
    )


@dataclass(frozen=True)
class CommsLoggerSection:
    """``comms_logger``: a count of calls and bytes of every collective."""

    enabled: bool = supported(False, Bool(), "the table is printed every steps_per_print steps (or 10)")
    prof_all: bool = supported(True, Bool(), "false: only the collectives in prof_ops are listed")
    prof_ops: tuple[str, ...] = supported((), Names(), "all_gather, reduce_scatter, all_reduce, broadcast")


@dataclass(frozen=True)
class ThroughputSection:
    """``timers.throughput``: the samples-per-second timer."""

    enabled: bool = supported(True, Bool(), "the progress line reports samples/s of all ranks")
    synchronized: bool = supported(True, Bool(), "the clock is read after the device has finished")


@dataclass(frozen=True)
class CompileSection:
    """``compile``: torch.compile, as ``engine.compile()`` applies it."""

    enabled: bool = supported(
        False,
        Bool(),
        "the model is compiled at initialize; at stage 3 block by block, since blocks are gathered and freed",
        origin=Origin.LEGACY,
    )
    backend: str = supported("inductor", Text(), "torch.compile's backend", origin=Origin.LEGACY)
    kwargs: Mapping[str, Any] = supported({}, MapOf(), "torch.compile's other arguments", origin=Origin.LEGACY)


@dataclass(frozen=True)
class TimersSection:
    """``timers``."""

    throughput: ThroughputSection = section(ThroughputSection, "the samples-per-second timer")


@dataclass(frozen=True)
class CheckpointWriterSection:
    """``checkpoint.writer``: whether training waits while a checkpoint is written."""

    decoupled: bool = supported(
        False,
        Bool(),
        "engine.save_checkpoint returns when parameters are copied to the host; optimizer state is copied before its update, files are written "
        "in the background, and a later step completes the checkpoint. Host memory per rank: the size of its own files",
    )


@dataclass(frozen=True)
class CheckpointSection:
    """``checkpoint``: tag checks and how checkpoints are written."""

    tag_validation: str = supported(
        "Warn",
        Text(("Ignore", "Warn", "Fail")),
        "if ranks save under different tags: use rank 0's tag silently (Ignore) or with a warning (Warn), or raise an error (Fail)",
    )
    load_universal: bool = refused(
        False,
        Bool(),
        "zero_trial's checkpoints load on any mesh without conversion; DeepSpeed's, universal or not, must be imported first",
        instead="Remove the key, and import the checkpoint: zero-trial ckpt import FOLDER NEW_FOLDER.",
    )
    use_node_local_storage: bool = refused(
        False,
        Bool(),
        "all ranks write into one shared folder",
        instead="Remove the key, and use a folder that all hosts can access.",
    )
    writer: CheckpointWriterSection = section(CheckpointWriterSection, "whether training waits")


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """``activation_checkpointing``: how checkpointed activations are stored."""

    number_checkpoints: int | None = no_effect(
        None, Int(1), "it sets the size of a buffer that does not exist in zero_trial", harmless=(False,)
    )
    partition_activations: bool = supported(
        False,
        Bool(),
        "inputs that zero_trial.checkpointing.checkpoint saves are split over the ranks of mesh.model; no effect if that is 1",
    )
    cpu_checkpointing: bool = supported(
        False,
        Bool(),
        "the inputs of checkpointed layers are stored in host memory: those of zero_trial.checkpointing.checkpoint, of "
        "transformers' gradient checkpointing and of torch's CheckpointWrapper",
    )


@dataclass(frozen=True)
class PipelineSection:
    """``pipeline``: how a pipeline engine runs; the last four are zero_trial's own."""

    activation_checkpoint_interval: int = supported(
        0,
        Int(0, unit="layers"),
        "groups of this many layers store only their input, and are recomputed in backward; 0 uses the PipelineModule's own setting",
    )
    stages: ClassVar = mapped(
        "auto",
        AnyOf((Text(("auto",)), Int(1))),
        "the number of pipeline stages; DeepSpeed ignores it",
        becomes="mesh.pipe",
        origin=Origin.DEEPSPEED,
    )
    schedule: str = ours(
        "1f1b",
        Text(tuple(SCHEDULE_CHUNKS), synonyms=SCHEDULE_SYNONYMS),
        "the order of each rank's actions, a trade-off between idle time and memory (zero-trial schedule prints each); zero_bubble means zb_h1",
    )
    chunks_per_rank: int | str = ours(
        "auto",
        AnyOf((Text(("auto",)), Int(1))),
        "parts of the model per rank, for interleaved and looped_bfs (auto: 2); zb_v has 2, all other schedules 1",
    )
    zero_policy: str = ours(
        "auto",
        Text(ZERO_POLICIES),
        "when a stage's parameters are gathered and its gradients reduced. At ZeRO stage "
        "3: hold gathers once per step, chunk once per run of a chunk, free for every "
        "computation. At stages 2 and 3: boundary reduces once per step, micro after "
        "every micro-batch. auto: the least communication, hold and boundary",
    )
    partition_method: str | None = ours(
        None,
        Text(("uniform", "parameters", "profile"), starts=("type:",)),
        "how the layers are partitioned, instead of the PipelineModule's own method: equal numbers of layers, equal numbers of trainable "
        "elements, equal measured time, or equal numbers of layers whose class matches the expression after type:",
    )


@dataclass(frozen=True)
class AutotuningSection:
    """``autotuning``: defaults of ``zero-trial tune``; training itself never reads it."""

    enabled: bool = no_effect(False, Bool(), "tuning is a command, zero-trial tune, which reads this section")
    fast: bool = supported(True, Bool(), "true: some of the candidates that fit are measured; false: all of them")
    tuner_type: str = supported(
        "model_based",
        Text(("model_based", "gridsearch", "random")),
        "model_based: the best by the plan's estimate; gridsearch: every candidate that fits; zero-trial tune refuses random",
    )
    tuner_num_trials: int | None = supported(
        None, Int(1), "maximum number of trials; null means a quarter of the candidates that fit, at least 3"
    )
    start_profile_step: int = supported(3, Int(1), "the first step that is measured")
    end_profile_step: int = supported(18, Int(2), "the last step that is measured")
    max_train_batch_size: int | None = supported(
        None, Int(1), "the global batch is not changed; tuning is refused if it is larger than this"
    )
    min_train_batch_size: int = supported(1, Int(1), "tuning is refused if the global batch is smaller than this")
    max_train_micro_batch_size_per_gpu: int = supported(1024, Int(1), "the largest micro-batch to try")
    min_train_micro_batch_size_per_gpu: int = supported(1, Int(1), "the smallest micro-batch to try")
    num_tuning_micro_batch_sizes: int = supported(
        3, Int(1), "how many micro-batches are tried per candidate: the largest that fit"
    )


@dataclass(frozen=True)
class RunningKeys:
    """The keys that control how a run is monitored, saved and executed."""

    steps_per_print: int | None = supported(
        None,
        Int(1, unit="steps", infinite=True),
        "optimizer steps between two progress lines; null or Infinity disables them",
    )
    wall_clock_breakdown: bool = supported(
        False,
        Bool(),
        "rank 0 prints milliseconds per step of forward, backward, the wait for "
        "reductions and the update, every steps_per_print steps (10 if that is not set); "
        "by events on CUDA, without synchronizing",
    )
    memory_breakdown: bool = supported(
        False,
        Bool(),
        "rank 0 prints bytes of parameters, gradients, optimizer state and the device, as often as the timers",
    )
    dump_state: bool = supported(
        False, Bool(), "rank 0 prints the whole configuration and the table of parameter groups at start"
    )
    dataloader_drop_last: bool = supported(
        False, Bool(), "the loader that initialize builds drops an incomplete last batch"
    )
    disable_python_gc: bool = supported(
        False,
        Bool(),
        "Python's cyclic garbage collector is disabled until engine.destroy(); call gc.collect() when a pause is acceptable",
    )
    log_level: str | None = supported(
        None, Text(), "lowest level of the engine's log messages: debug, info, warning, error, critical"
    )
    comm_timeout_seconds: float = ours(
        300.0, Float(above=0), "how long a collective waits for a rank before it raises an error"
    )
    comm_transport: str = ours(
        "auto",
        Text(("auto", "gloo")),
        "how tensors travel between CPU ranks: auto uses shared memory where ranks of one host can share it, and gloo's connections elsewhere; "
        "gloo always uses connections. GPUs always use NCCL",
    )
    tensorboard: MonitorFileSection = section(
        MonitorFileSection,
        "Train/Samples/train_loss, lr, loss_scale and eval_loss against global samples, "
        "written by rank 0 after every step, as TensorBoard events; needs the package "
        "tensorboard",
    )
    csv_monitor: MonitorFileSection = section(MonitorFileSection, "the same events as CSV files, one per name")
    wandb: WandbSection = section(WandbSection, "the same events to Weights & Biases; needs the package wandb")
    comet: CometSection = section(CometSection, "the same events to Comet; needs the package comet_ml")
    mlflow: MlflowSection = section(MlflowSection, "the same events to MLflow; needs mlflow, or mlflow-skinny")
    trackio: TrackioSection = section(TrackioSection, "the same events to trackio; needs the package trackio")
    flops_profiler: FlopsProfilerSection = section(
        FlopsProfilerSection,
        "one micro-batch of rank 0 in floating-point operations, parameters, milliseconds and MFU, per module; afterwards progress lines and "
        "events include the MFU of their steps",
    )
    comms_logger: CommsLoggerSection = section(
        CommsLoggerSection, "calls, elements and bytes of every collective; see engine.comms_summary()"
    )
    timers: TimersSection = section(TimersSection, "timers")
    checkpoint: CheckpointSection = section(CheckpointSection, "how checkpoints are named and written")
    activation_checkpointing: ActivationCheckpointingSection = section(
        ActivationCheckpointingSection, "how activations are kept between forward and backward"
    )
    pipeline: PipelineSection = section(PipelineSection, "how a pipeline runs: a model that is a PipelineModule")
    autotuning: AutotuningSection = section(AutotuningSection, "defaults of zero-trial tune")
    compile: CompileSection = section(CompileSection, "torch.compile")
