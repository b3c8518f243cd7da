"""Rows of the table for how a run is watched, saved and driven: printing, monitors, checkpoints, activation memory, pipelines."""

from __future__ import annotations

from zero_trial.config.key import Answer, Key, Origin, alike
from zero_trial.config.kinds import AnyOf, Bool, DType, Float, Int, Names, Opaque, Section, Text

HONOURED, NO_EFFECT, NOT_YET, REFUSED = Answer.HONOURED, Answer.NO_EFFECT, Answer.NOT_YET, Answer.REFUSED

_ACTIVATIONS = "the engine does not checkpoint activations yet; torch.utils.checkpoint in the model works"
_PIPELINE = "it belongs to a pipeline, which does not exist here yet"
_MONITOR = "monitors are not written yet; metrics go to the run folder"


PRINTING = (
    Key(
        "steps_per_print",
        Int(1, unit="steps", infinite=True),
        HONOURED,
        "a progress line every so many optimizer steps; null or Infinity means none",
    ),
    Key("wall_clock_breakdown", Bool(), NOT_YET, "timers of forward, backward and step are not printed yet"),
    Key("memory_breakdown", Bool(), NOT_YET, "memory is not printed per step yet"),
    Key("dump_state", Bool(), NOT_YET, "the configuration is not printed by the engine yet; it is in the run folder"),
    Key(
        "dataloader_drop_last", Bool(), HONOURED, "the loader that initialize makes leaves out an incomplete last batch"
    ),
    Key("disable_python_gc", Bool(), NOT_YET, "Python's garbage collector is left on"),
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
)

MONITORS = (
    Key("tensorboard", Section(), HONOURED, "scalars as TensorBoard events"),
    *alike("tensorboard", NOT_YET, _MONITOR, enabled=Bool(), output_path=Text(), job_name=Text()),
    Key("csv_monitor", Section(), HONOURED, "scalars as CSV files"),
    *alike("csv_monitor", NOT_YET, _MONITOR, enabled=Bool(), output_path=Text(), job_name=Text()),
    Key("wandb", Section(), HONOURED, "scalars to Weights & Biases"),
    *alike("wandb", NOT_YET, _MONITOR, enabled=Bool(), group=Text(), team=Text(), project=Text()),
    Key("comet", Section(), HONOURED, "scalars to Comet"),
    *alike(
        "comet",
        NOT_YET,
        _MONITOR,
        enabled=Bool(),
        samples_log_interval=Int(1),
        project=Text(),
        workspace=Text(),
        api_key=Text(),
        experiment_name=Text(),
        experiment_key=Text(),
        online=Bool(),
        mode=Text(("get_or_create", "create", "get")),
    ),
    Key("flops_profiler", Section(), HONOURED, "counts floating-point operations"),
    *alike(
        "flops_profiler",
        NOT_YET,
        "floating-point operations are not counted yet",
        enabled=Bool(),
        profile_step=Int(1),
        module_depth=Int(-1),
        top_modules=Int(1),
        detailed=Bool(),
        output_file=Text(),
        recompute_fwd_factor=Float(low=0),
    ),
    Key("comms_logger", Section(), HONOURED, "counts of collectives"),
    *alike(
        "comms_logger",
        NOT_YET,
        "calls and bytes are always counted, but not logged yet",
        enabled=Bool(),
        verbose=Bool(),
        prof_all=Bool(),
        prof_ops=Names(),
        debug=Bool(),
    ),
    Key("timers", Section(), HONOURED, "timers"),
    Key("timers.throughput", Section(), HONOURED, "the samples-per-second timer"),
    *alike(
        "timers.throughput",
        NOT_YET,
        "throughput is always measured per progress line",
        enabled=Bool(),
        synchronized=Bool(),
    ),
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
        NOT_YET,
        _ACTIVATIONS,
        partition_activations=Bool(),
        contiguous_memory_optimization=Bool(),
        cpu_checkpointing=Bool(),
        synchronize_checkpoint_boundary=Bool(),
        profile=Bool(),
    ),
    Key("activation_checkpointing.number_checkpoints", Int(1), NOT_YET, _ACTIVATIONS, harmless=(False,)),
)

PIPELINE = (
    Key("pipeline", Section(), HONOURED, "how a pipeline runs"),
    *alike(
        "pipeline",
        NOT_YET,
        _PIPELINE,
        seed_layers=Bool(),
        activation_checkpoint_interval=Int(0),
        pipe_partitioned=Bool(),
        grad_partitioned=Bool(),
        use_reentrant=Bool(),
    ),
    Key(
        "pipeline.stages",
        AnyOf((Text(("auto",)), Int(1))),
        NO_EFFECT,
        "the number of pipeline stages is mesh.pipe; DeepSpeed ignores it as well",
        default="auto",
    ),
    Key(
        "pipeline.partition",
        Text(),
        NO_EFFECT,
        "it is an argument of PipelineModule; DeepSpeed ignores it as well",
        default="best",
    ),
    Key(
        "pipeline.schedule",
        Text(("gpipe", "1f1b", "interleaved", "zero_bubble")),
        NOT_YET,
        _PIPELINE,
        origin=Origin.OURS,
    ),
    Key("pipeline.zero_policy", Text(("auto", "hold", "micro")), NOT_YET, _PIPELINE, origin=Origin.OURS),
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
