"""The words of ds_config's ``pipeline`` section: schedules and policies by name, and what each can be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zero_trial.ds_config.key import Key, Origin, Support, alike
from zero_trial.schema.types import AnyOf, Bool, DType, Float, Int, Names, Opaque, Section, Text

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


# Rows of the table for how a run is watched, saved and driven: printing, monitors, checkpoints, activation memory, pipelines.


HONOURED, NO_EFFECT, NOT_YET, REFUSED = Support.HONOURED, Support.NO_EFFECT, Support.NOT_YET, Support.REFUSED


MAPPED = Support.MAPPED


_FOLDER = (
    "written to output_path/job_name; without an output path, to a folder of the section's name where the run started"
)


PRINTING = (
    Key(
        "steps_per_print",
        Int(1, unit="steps", infinite=True),
        HONOURED,
        "a progress line every so many optimizer steps; null or Infinity means none",
    ),
    Key(
        "wall_clock_breakdown",
        Bool(),
        HONOURED,
        "rank 0 prints milliseconds per step of forward, backward, the wait for reductions and the update, "
        "every steps_per_print steps (10 if that is not set); by events on CUDA, without synchronizing",
    ),
    Key(
        "memory_breakdown",
        Bool(),
        HONOURED,
        "rank 0 prints bytes of parameters, gradients, optimizer state and the device, as often as the timers",
    ),
    Key("dump_state", Bool(), HONOURED, "rank 0 prints the whole configuration and the table of units at start"),
    Key(
        "dataloader_drop_last", Bool(), HONOURED, "the loader that initialize makes leaves out an incomplete last batch"
    ),
    Key(
        "disable_python_gc",
        Bool(),
        HONOURED,
        "Python's cycle collector is off until engine.destroy(); call gc.collect() where a pause does no harm",
    ),
    Key(
        "log_level",
        Text(),
        HONOURED,
        "least level of the lines that the engine prints: debug, info, warning, error, critical",
    ),
    Key(
        "comm_timeout_seconds",
        Float(above=0),
        HONOURED,
        "how long a collective may wait for a rank before it ends in an error",
        origin=Origin.OURS,
    ),
    Key(
        "comm_transport",
        Text(("auto", "gloo")),
        HONOURED,
        "how tensors travel between CPU ranks: auto takes memory that ranks of one host share where they can, and gloo's connections elsewhere; "
        "gloo always takes the latter. GPUs use NCCL either way",
        origin=Origin.OURS,
    ),
)


MONITORS = (
    Key(
        "tensorboard",
        Section(),
        HONOURED,
        "Train/Samples/train_loss, lr, loss_scale and eval_loss against global samples, written by rank 0 after every "
        "step, as TensorBoard events; needs the package tensorboard",
    ),
    *alike("tensorboard", HONOURED, "see tensorboard", enabled=Bool()),
    *alike("tensorboard", HONOURED, _FOLDER, output_path=Text(), job_name=Text()),
    Key("csv_monitor", Section(), HONOURED, "the same events as CSV files, one per name"),
    *alike("csv_monitor", HONOURED, "see csv_monitor", enabled=Bool()),
    *alike("csv_monitor", HONOURED, _FOLDER, output_path=Text(), job_name=Text()),
    Key("wandb", Section(), HONOURED, "the same events to Weights & Biases; needs the package wandb"),
    *alike("wandb", HONOURED, "passed to wandb.init; team is its entity", group=Text(), team=Text(), project=Text()),
    *alike("wandb", HONOURED, "see wandb", enabled=Bool()),
    Key("comet", Section(), HONOURED, "the same events to Comet; needs the package comet_ml"),
    *alike("comet", HONOURED, "see comet", enabled=Bool()),
    *alike(
        "comet",
        HONOURED,
        "of every name, an event is sent when so many samples have gone by",
        samples_log_interval=Int(1),
    ),
    *alike("comet", HONOURED, "the name that the experiment gets", experiment_name=Text()),
    *alike(
        "comet",
        HONOURED,
        "passed to comet_ml.start",
        project=Text(),
        workspace=Text(),
        api_key=Text(),
        experiment_key=Text(),
        online=Bool(),
        mode=Text(("get_or_create", "create", "get")),
    ),
    Key(
        "flops_profiler",
        Section(),
        HONOURED,
        "one micro-batch of rank 0 in floating-point operations, parameters, milliseconds and MFU, per module",
    ),
    *alike("flops_profiler", HONOURED, "see flops_profiler", enabled=Bool()),
    *alike(
        "flops_profiler",
        HONOURED,
        "global_steps at which a micro-batch is timed; one of the step before is counted",
        profile_step=Int(1),
    ),
    *alike("flops_profiler", HONOURED, "how deep modules are listed; -1 means all", module_depth=Int(-1)),
    *alike("flops_profiler", HONOURED, "how many kinds of modules are named per depth", top_modules=Int(1)),
    *alike("flops_profiler", HONOURED, "the tree of modules is printed too", detailed=Bool()),
    *alike("flops_profiler", HONOURED, "the report goes into this file instead of the log", output_file=Text()),
    *alike(
        "flops_profiler",
        HONOURED,
        "part of forward that backward does again: it is in what is counted, and is taken off for MFU",
        recompute_fwd_factor=Float(low=0),
    ),
    Key(
        "comms_logger", Section(), HONOURED, "calls, elements and bytes of every collective; see engine.comms_summary()"
    ),
    *alike("comms_logger", HONOURED, "the table is printed every steps_per_print steps (or 10)", enabled=Bool()),
    *alike("comms_logger", HONOURED, "false: only the collectives in prof_ops are listed", prof_all=Bool()),
    *alike("comms_logger", HONOURED, "all_gather, reduce_scatter, all_reduce, broadcast", prof_ops=Names()),
    *alike(
        "comms_logger",
        NO_EFFECT,
        "single calls are not logged, their sums are",
        verbose=Bool(),
        debug=Bool(),
    ),
    Key("timers", Section(), HONOURED, "timers"),
    Key("timers.throughput", Section(), HONOURED, "the samples-per-second timer"),
    *alike("timers.throughput", HONOURED, "the progress line says samples/s of all ranks", enabled=Bool()),
    *alike("timers.throughput", HONOURED, "the device is waited for before the clock is read", synchronized=Bool()),
)


CHECKPOINT = (
    Key("checkpoint", Section(), HONOURED, "how checkpoints are named and written"),
    Key(
        "checkpoint.tag_validation",
        Text(("Ignore", "Warn", "Fail")),
        HONOURED,
        "when ranks save under different tags: rank 0's is taken (Ignore), with a warning (Warn), or it is an error (Fail)",
    ),
    Key(
        "checkpoint.load_universal",
        Bool(),
        REFUSED,
        "DeepSpeed's universal checkpoints are not read; ours need no conversion to other meshes",
        instead="Remove the key.",
    ),
    Key(
        "checkpoint.use_node_local_storage",
        Bool(),
        REFUSED,
        "all ranks write into one shared folder",
        instead="Remove the key, and give a folder that all hosts see.",
    ),
    Key("checkpoint.parallel_write", Section(), HONOURED, "who writes"),
    Key("checkpoint.parallel_write.pipeline_stage", Bool(), NO_EFFECT, "every rank always writes what it holds"),
    Key("checkpoint.writer", Opaque(), NO_EFFECT, "there is one writer"),
)


ACTIVATION = (
    Key("activation_checkpointing", Section(), HONOURED, "how activations are kept between forward and backward"),
    *alike(
        "activation_checkpointing",
        HONOURED,
        "inputs that zero_trial.checkpointing.checkpoint saves are cut over the ranks of mesh.model; when that is 1 there is nothing to cut",
        partition_activations=Bool(),
    ),
    *alike(
        "activation_checkpointing",
        HONOURED,
        "inputs that zero_trial.checkpointing.checkpoint saves wait on the host",
        cpu_checkpointing=Bool(),
    ),
    *alike(
        "activation_checkpointing",
        NO_EFFECT,
        "saved inputs have no buffer of their own that would have to be contiguous",
        contiguous_memory_optimization=Bool(),
    ),
    Key(
        "activation_checkpointing.number_checkpoints",
        Int(1),
        NO_EFFECT,
        "it sizes a buffer that does not exist here",
        harmless=(False,),
    ),
    *alike(
        "activation_checkpointing",
        NO_EFFECT,
        "torch.profiler shows what a checkpointed block costs, without waiting for the device",
        synchronize_checkpoint_boundary=Bool(),
        profile=Bool(),
    ),
)


PIPELINE = (
    Key("pipeline", Section(), HONOURED, "how a pipeline runs: a model that is a PipelineModule"),
    Key(
        "pipeline.seed_layers",
        Bool(),
        NO_EFFECT,
        "it is an argument of PipelineModule; DeepSpeed ignores it here as well",
    ),
    Key(
        "pipeline.activation_checkpoint_interval",
        Int(0, unit="layers"),
        HONOURED,
        "so many layers at a time keep their input only, and are computed again in backward; 0 leaves it to the PipelineModule",
    ),
    *alike(
        "pipeline",
        NO_EFFECT,
        "messages between stages are sent whole by every model-parallel rank",
        pipe_partitioned=Bool(),
        grad_partitioned=Bool(),
    ),
    Key("pipeline.use_reentrant", Bool(), NO_EFFECT, "checkpointed layers never start a backward inside a backward"),
    Key(
        "pipeline.stages",
        AnyOf((Text(("auto",)), Int(1))),
        MAPPED,
        "the number of pipeline stages; DeepSpeed ignores it",
        default="auto",
        becomes="mesh.pipe",
    ),
    Key(
        "pipeline.partition",
        Text(),
        NO_EFFECT,
        "DeepSpeed ignores it as well; pipeline.partition_method does what it says",
        default="best",
    ),
    Key(
        "pipeline.schedule",
        Text(tuple(SCHEDULE_CHUNKS), synonyms=SCHEDULE_SYNONYMS),
        HONOURED,
        "in which order a rank does what: the fewest idle ranks for the memory that there is (zero-trial schedule draws each); "
        "zero_bubble means zb_h1",
        origin=Origin.OURS,
    ),
    Key(
        "pipeline.chunks_per_rank",
        AnyOf((Text(("auto",)), Int(1))),
        HONOURED,
        "parts of the model that a rank holds, for interleaved and looped_bfs (auto: 2); the others have 1, and zb_v 2",
        origin=Origin.OURS,
    ),
    Key(
        "pipeline.zero_policy",
        Text(ZERO_POLICIES),
        HONOURED,
        "when a stage's parameters are gathered and its gradients reduced. At ZeRO stage 3: hold gathers once per step, chunk once per run of "
        "a chunk, free for every computation. At stages 2 and 3: boundary reduces once per step, micro after every micro-batch. auto: what "
        "moves least and fits into memory",
        origin=Origin.OURS,
    ),
    Key(
        "pipeline.partition_method",
        Text(("uniform", "parameters", "profile"), starts=("type:",)),
        HONOURED,
        "where the layers are cut, instead of the PipelineModule's own method: equally many layers, equally many trainable elements, equal "
        "measured time, or equally many layers whose class matches the expression after type:",
        origin=Origin.OURS,
    ),
)


PARALLEL = (
    Key(
        "sequence_parallel_size",
        Int(1, unit="ranks"),
        REFUSED,
        "sequence parallelism does not exist here yet",
        harmless=(1,),
        instead="Remove the key.",
    ),
    Key(
        "data_parallel_size",
        Int(1, unit="ranks"),
        NO_EFFECT,
        "the data-parallel size follows from the ranks and the mesh",
    ),
    Key("tensor_parallel", Section(), HONOURED, "tensor parallelism"),
    Key(
        "tensor_parallel.autotp_size",
        Int(0, unit="ranks"),
        REFUSED,
        "automatic tensor parallelism does not exist here",
        default=0,
        harmless=(1,),
        instead="Remove the section; mesh.model is for models that are parallel themselves.",
    ),
    Key(
        "tensor_parallel.tp_size",
        Int(1, unit="ranks"),
        REFUSED,
        "automatic tensor parallelism does not exist here",
        default=1,
        instead="Remove the section.",
    ),
    Key("tensor_parallel.dtype", DType(), NO_EFFECT, "tensor parallelism is off"),
    *alike(
        "tensor_parallel",
        NO_EFFECT,
        "tensor parallelism is off",
        tp_grain_size=Int(1),
        tp=Opaque(),
        injection_policy_tuple=Opaque(),
        keep_module_on_host=Bool(),
        replace_with_kernel_inject=Bool(),
    ),
    Key("expert_parallel", Opaque(), REFUSED, "expert parallelism does not exist here", instead="Remove the section."),
    Key("compile", Opaque(), NOT_YET, "the model is run as it is; torch.compile it before initialize"),
)


RUNNING = PRINTING + MONITORS + CHECKPOINT + ACTIVATION + PIPELINE + PARALLEL
