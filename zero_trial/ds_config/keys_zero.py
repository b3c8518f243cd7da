"""Rows of the table for zero_optimization and the mesh: what is sharded, in which sizes, over which axes."""

from __future__ import annotations

from zero_trial.ds_config.key import Key, Origin, Support
from zero_trial.schema.types import Bool, Float, Int, Names, Opaque, Section, Text

HONOURED, NO_EFFECT, NOT_YET, REFUSED = Support.HONOURED, Support.NO_EFFECT, Support.NOT_YET, Support.REFUSED

_NO_UPLOAD = "parameters are not offloaded from a GPU"
_QUANTIZED = "quantised communication does not exist here yet, and it changes results"


_Z = "zero_optimization"

STAGE = (
    Key(
        _Z, Section(switch="stage"), HONOURED, "what is sharded over the data-parallel ranks; a bare true means stage 1"
    ),
    Key(
        f"{_Z}.stage",
        Int(0, 3),
        HONOURED,
        "0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters",
    ),
    Key(f"{_Z}.contiguous_gradients", Bool(), NO_EFFECT, "gradients always land in flat buffers"),
    Key(f"{_Z}.reduce_scatter", Bool(), NO_EFFECT, "gradients are always reduce-scattered, never all-reduced and cut"),
    Key(
        f"{_Z}.reduce_bucket_size",
        Int(1, unit="elements"),
        HONOURED,
        "an upper limit; the buffer is never larger than the model needs",
    ),
    Key(
        f"{_Z}.allgather_bucket_size",
        Int(1, unit="elements"),
        NOT_YET,
        "parameters are gathered unit by unit, and a unit is limited by reduce_bucket_size",
    ),
    Key(f"{_Z}.use_multi_rank_bucket_allreduce", Bool(), NO_EFFECT, "there is no all-reduce to bucket", default=True),
    Key(
        f"{_Z}.allgather_partitions",
        Bool(),
        NO_EFFECT,
        "parameters are always all-gathered; DeepSpeed ignores it as well",
        default=True,
    ),
    Key(
        f"{_Z}.overlap_comm",
        Bool(),
        HONOURED,
        "communication runs beside computation; null means true at ZeRO stage 3, as in DeepSpeed",
    ),
    Key(
        f"{_Z}.compute_grad_norm",
        Bool(),
        NOT_YET,
        "the norm is always computed: it costs one pass that the overflow check needs anyway",
    ),
    Key(
        f"{_Z}.load_from_fp32_weights",
        Bool(),
        REFUSED,
        "loading takes the fp32 master weights of the checkpoint",
        instead="Remove the key.",
    ),
    Key(
        f"{_Z}.elastic_checkpoint", Bool(), NO_EFFECT, "checkpoints do not depend on the number of ranks", default=False
    ),
    Key(
        f"{_Z}.prefetch_bucket_size",
        Int(0, unit="elements"),
        HONOURED,
        "how much is gathered ahead of need",
        aliases=("stage3_prefetch_bucket_size",),
    ),
    Key(
        f"{_Z}.param_persistence_threshold",
        Int(0, unit="elements"),
        HONOURED,
        "parameters up to this size stay gathered",
        aliases=("stage3_param_persistence_threshold",),
    ),
    Key(
        f"{_Z}.model_persistence_threshold",
        Int(0, unit="elements"),
        HONOURED,
        "the most that stays gathered in all",
        aliases=("stage3_model_persistence_threshold",),
    ),
    Key(
        f"{_Z}.max_live_parameters",
        Int(0, unit="elements"),
        HONOURED,
        "the most that is gathered at one time",
        aliases=("stage3_max_live_parameters",),
    ),
    Key(
        f"{_Z}.max_reuse_distance",
        Int(0, unit="elements"),
        HONOURED,
        "a parameter that is used again within this distance is not freed",
        aliases=("stage3_max_reuse_distance",),
    ),
    Key(
        f"{_Z}.gather_16bit_weights_on_model_save",
        Bool(),
        NOT_YET,
        "checkpoints hold every weight whole or in ranges at any stage",
        aliases=("stage3_gather_16bit_weights_on_model_save",),
    ),
    Key(
        f"{_Z}.stage3_gather_fp16_weights_on_model_save",
        Bool(),
        Support.MAPPED,
        "the old spelling",
        default=False,
        becomes=f"{_Z}.gather_16bit_weights_on_model_save",
        aliases=("gather_fp16_weights_on_model_save",),
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.module_granularity_threshold",
        Int(0, unit="elements"),
        HONOURED,
        "the smallest unit at ZeRO stage 3: smaller neighbouring blocks are put together; 0 means 131072, 1 makes every block a unit",
        aliases=("stage3_module_granularity_threshold",),
    ),
    Key(
        f"{_Z}.use_all_reduce_for_fetch_params",
        Bool(),
        NO_EFFECT,
        "parameters are fetched by all-gather",
        default=False,
        aliases=("stage3_use_all_reduce_for_fetch_params",),
    ),
    Key(
        f"{_Z}.allgather_sequential",
        Bool(),
        NO_EFFECT,
        "one all-gather per unit",
        default=False,
        aliases=("stage3_allgather_sequential",),
    ),
    Key(
        f"{_Z}.ignore_unused_parameters",
        Bool(),
        NOT_YET,
        "unused parameters are always allowed; their gradient is zero",
    ),
    Key(
        f"{_Z}.legacy_stage1",
        Bool(),
        REFUSED,
        "the old stage 1 is gone; DeepSpeed raises as well",
        default=False,
        instead="Remove the key.",
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.round_robin_gradients", Bool(), NO_EFFECT, "every rank owns an equal part of every buffer", default=False
    ),
    Key(f"{_Z}.parameter_alignment", Bool(), NOT_YET, "alignment is chosen by the layout"),
    Key(f"{_Z}.memory_efficient_linear", Bool(), NO_EFFECT, "torch.nn.Linear is used as it is", default=True),
    Key(f"{_Z}.pipeline_loading_checkpoint", Bool(), NO_EFFECT, "ranks read only what they need", default=False),
    Key(f"{_Z}.override_module_apply", Bool(), NO_EFFECT, "Module.apply is left as it is", default=True),
    Key(f"{_Z}.log_trace_cache_warnings", Bool(), NO_EFFECT, "there is no trace cache", default=False),
    Key(f"{_Z}.enable_sanity_checks", Bool(), NOT_YET, "the order of collectives is not compared between ranks"),
    Key(f"{_Z}.save_muon_momentum_buffer_in_memory", Bool(), NOT_YET, "it belongs to Muon"),
    Key(
        f"{_Z}.leaf_module",
        Section(),
        HONOURED,
        "modules that are gathered as one unit; DeepSpeed lists three mixture-of-experts classes by default, zero_trial none",
    ),
    Key(f"{_Z}.leaf_module.classes", Names(), HONOURED, "class names, bare or with their module"),
    Key(f"{_Z}.leaf_module.names", Names(), HONOURED, "dotted module names"),
    Key(f"{_Z}.leaf_module.name_suffixes", Names(), HONOURED, "ends of dotted module names"),
    Key(
        f"{_Z}.reduce_every",
        Text(("auto", "micro", "boundary")),
        HONOURED,
        "when gradients are reduced: after every micro-batch (least memory) or at the accumulation boundary (least traffic)",
        origin=Origin.OURS,
    ),
    Key(
        f"{_Z}.reshard_after",
        Text(("auto", "forward", "step")),
        HONOURED,
        "ZeRO stage 3: when gathered parameters are freed: after each use (least memory) or after the step (least traffic)",
        origin=Origin.OURS,
    ),
)

HYBRID = (
    Key(
        f"{_Z}.mics_shard_size",
        Int(-1, unit="ranks"),
        HONOURED,
        "the size of the shard axis; the other ranks are replicas. -1 means no limit",
        harmless=(-1,),
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.mics_hierarchical_params_gather",
        Bool(),
        NO_EFFECT,
        "parameters are gathered over the shard axis in one step",
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.zero_hpz_partition_size",
        Int(1, unit="ranks"),
        NOT_YET,
        "parameters are gathered over the whole shard axis; use mics_shard_size or mesh.shard for hybrid sharding",
    ),
    Key(f"{_Z}.zero_quantized_weights", Bool(), REFUSED, _QUANTIZED, instead="Remove the key."),
    Key(f"{_Z}.zero_quantized_nontrainable_weights", Bool(), REFUSED, _QUANTIZED, instead="Remove the key."),
    Key(f"{_Z}.zero_quantized_gradients", Bool(), REFUSED, _QUANTIZED, instead="Remove the key."),
    Key(
        f"{_Z}.zeropp_loco_param",
        Opaque(),
        NO_EFFECT,
        "it corrects quantised gradients, which are refused",
        origin=Origin.LEGACY,
    ),
    Key("mesh", Section(), HONOURED, "the sizes of the axes that the ranks live on", origin=Origin.OURS),
    Key(
        "mesh.shard",
        Int(1, unit="ranks"),
        HONOURED,
        "ranks that share one copy of the state; null means all data-parallel ranks (1 at ZeRO stage 0)",
        origin=Origin.OURS,
    ),
    Key(
        "mesh.replica",
        Int(1, unit="ranks"),
        HONOURED,
        "copies of the sharded state; null is derived",
        origin=Origin.OURS,
    ),
    Key(
        "mesh.pipe",
        Int(1, unit="pipeline stages"),
        HONOURED,
        "stages that the layers of a PipelineModule are cut into; each stage has the other axes' ranks",
        origin=Origin.OURS,
    ),
    Key(
        "mesh.model",
        Int(1, unit="ranks"),
        HONOURED,
        "ranks of a model-parallel group, which see the same data",
        origin=Origin.OURS,
    ),
)


_DEVICES = Text(("none", "cpu", "nvme"))

OFFLOADS = (
    Key(f"{_Z}.offload_optimizer", Section(), HONOURED, "where optimizer state lives between steps"),
    Key(
        f"{_Z}.offload_optimizer.device",
        _DEVICES,
        HONOURED,
        "nvme: fp32 masters and moments live in a file; cpu: in host memory, where CPU ranks have them anyway. Updates run on the CPU",
    ),
    Key(f"{_Z}.offload_optimizer.nvme_path", Text(), HONOURED, "the folder of the files, one for each rank"),
    Key(
        f"{_Z}.offload_optimizer.buffer_count",
        Int(1),
        HONOURED,
        "buffers through which offloaded state passes; 3 let reading, updating and writing overlap",
    ),
    Key(
        f"{_Z}.offload_optimizer.pin_memory",
        Bool(),
        HONOURED,
        "the buffers between a GPU and its host are pinned; there are none where ranks compute on the CPU",
        was="false",
    ),
    Key(f"{_Z}.offload_optimizer.pipeline_read", Bool(), NO_EFFECT, "reads always run ahead of the update"),
    Key(f"{_Z}.offload_optimizer.pipeline_write", Bool(), NO_EFFECT, "writes always run behind the update"),
    Key(f"{_Z}.offload_optimizer.fast_init", Bool(), NO_EFFECT, "masters go to NVMe while the model is built"),
    Key(
        f"{_Z}.offload_optimizer.ratio",
        Float(low=0, high=1),
        HONOURED,
        "nvme: at most this part of the state goes to the file, unit by unit; on a GPU all of it leaves",
    ),
    Key(f"{_Z}.offload_optimizer.super_offload", Bool(), NO_EFFECT, "there is one way of offloading"),
    Key(
        f"{_Z}.offload_optimizer.cpuadam_cores_perc",
        Float(above=0, high=1),
        NO_EFFECT,
        "it tunes super_offload; updates use the threads that torch has",
    ),
    Key(
        f"{_Z}.offload_optimizer.pipeline",
        Bool(),
        NO_EFFECT,
        "DeepSpeed derives it from pipeline_read and pipeline_write",
        default=False,
    ),
    Key(f"{_Z}.offload_param", Section(), HONOURED, "where parameter shards live between uses"),
    Key(
        f"{_Z}.offload_param.device",
        _DEVICES,
        HONOURED,
        "nvme: the shards of ZeRO stage 3 live in a file; cpu: in host memory, where CPU ranks have them anyway. From a GPU both are refused",
    ),
    Key(f"{_Z}.offload_param.nvme_path", Text(), HONOURED, "the folder of the files, one for each rank"),
    Key(f"{_Z}.offload_param.buffer_count", Int(1), HONOURED, "buffers into which shards are read ahead of their use"),
    Key(
        f"{_Z}.offload_param.buffer_size",
        Int(1, unit="elements"),
        HONOURED,
        "at most so many elements in a buffer; fewer where shards are smaller, or all buffers would hold more than a quarter of them",
    ),
    Key(
        f"{_Z}.offload_param.max_in_cpu",
        Int(0, unit="elements"),
        HONOURED,
        "so many elements of a rank's shards stay in memory; with 0 all leave that are freed between uses",
    ),
    Key(f"{_Z}.offload_param.pin_memory", Bool(), NOT_YET, _NO_UPLOAD, was="false"),
    Key(
        f"{_Z}.sub_group_size",
        Int(1, unit="elements"),
        HONOURED,
        "at most so many elements of offloaded state in a buffer; smaller where all buffers would hold more than a quarter of it",
    ),
    Key(
        f"{_Z}.cpu_offload",
        Bool(),
        Support.MAPPED,
        "the old spelling",
        default=False,
        becomes=f"{_Z}.offload_optimizer",
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.cpu_offload_param",
        Bool(),
        Support.MAPPED,
        "the old spelling",
        default=False,
        becomes=f"{_Z}.offload_param",
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.cpu_offload_params",
        Bool(),
        Support.MAPPED,
        "the old spelling",
        default=False,
        becomes=f"{_Z}.offload_param",
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.cpu_offload_use_pin_memory",
        Bool(),
        NO_EFFECT,
        "pin_memory stands in the offload sections",
        default=False,
        origin=Origin.LEGACY,
    ),
    Key(
        f"{_Z}.zenflow",
        Opaque(),
        REFUSED,
        "ZenFlow updates with stale gradients; it does not exist here",
        instead="Remove the section.",
    ),
    Key("aio", Section(), HONOURED, "it tunes reads and writes of NVMe offload"),
    Key("aio.block_size", Int(1, unit="bytes"), HONOURED, "bytes of one request; rounded up to blocks of 4096"),
    Key(
        "aio.queue_depth",
        Int(1, high=1024),
        HONOURED,
        "requests of a rank under way at once, each in a thread of its own",
    ),
    Key(
        "aio.intra_op_parallelism",
        Int(1),
        NO_EFFECT,
        "queue_depth says how many threads there are",
        default=1,
        aliases=("thread_count",),
    ),
    Key("aio.single_submit", Bool(), NO_EFFECT, "every request is a call of its own", default=False),
    Key("aio.overlap_events", Bool(), NO_EFFECT, "requests are always under way while others are made", default=True),
    Key(
        "aio.use_gds",
        Bool(),
        NO_EFFECT,
        "the update runs on the CPU, so nothing goes from the disk to a GPU",
        default=False,
    ),
)

ZERO = STAGE + HYBRID + OFFLOADS
