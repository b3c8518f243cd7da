"""Rows of the table for keys that DeepSpeed removed, never implemented, or that only a few people use: each gets an answer, none a crash."""

from __future__ import annotations

from zero_trial.ds_config.key import Key, Origin, Support, ignored, refused
from zero_trial.schema.types import Bool, Int, Opaque

LEGACY = (
    refused(
        "compression_training", "it quantises or prunes the model while it is trained; removed from DeepSpeed in 0.19.8"
    ),
    refused("quantize_training", "it quantises the weights while they are trained; removed from DeepSpeed in 0.19.8"),
    refused("progressive_layer_drop", "it drops layers while training; removed from DeepSpeed in 0.19.8"),
    refused(
        "curriculum_learning",
        "it changes the sequence length while training; removed from DeepSpeed in 0.19.8",
        "Set enabled: false, and cut the sequences in the data loader.",
    ),
    refused(
        "elasticity",
        "it changes the batch size with the number of ranks; removed from DeepSpeed in 0.19.8",
        "Set enabled: false and train_batch_size: checkpoints resume on any number of ranks with the same batch.",
    ),
    refused(
        "data_efficiency",
        "it samples the data and drops tokens while training; it does not exist here",
        "Set enabled: false, and use a sampler of your own.",
        Origin.DEEPSPEED,
    ),
    refused(
        "hybrid_engine",
        "it switches between training and generation kernels; it does not exist here",
        origin=Origin.DEEPSPEED,
    ),
    refused(
        "zenflow",
        "ZenFlow updates with stale gradients; it does not exist here",
        "Remove the section.",
        Origin.DEEPSPEED,
    ),
    ignored("sparse_attention", "DeepSpeed only passed it on to models that asked for it; removed there in 0.19.8"),
    ignored("eigenvalue", "it only steered quantize_training; removed from DeepSpeed in 0.19.8"),
    ignored("graph_harvesting", "it only recorded CUDA graphs; removed from DeepSpeed in 0.19.8"),
    ignored("nebula", "checkpoints are written by zero_trial's own writer; removed from DeepSpeed in 0.19.8"),
    Key("datastates_ckpt", Opaque(), Support.NO_EFFECT, "checkpoints are written by zero_trial's own writer"),
    Key("autotuning", Opaque(), Support.NOT_YET, "nothing is tuned; training runs with the values that stand here"),
    ignored("weight_quantization", "it is for inference"),
    Key("vocabulary_size", Int(1), Support.NO_EFFECT, "DeepSpeed only warns about its alignment", origin=Origin.LEGACY),
    Key(
        "cuda_visible_devices",
        Opaque(),
        Support.NO_EFFECT,
        "the launcher decides which devices a rank sees",
        origin=Origin.LEGACY,
    ),
    Key(
        "use_data_before_expert_parallelism",
        Bool(),
        Support.NO_EFFECT,
        "expert parallelism does not exist here",
        default=False,
        aliases=("use_data_before_expert_parallel",),
    ),
    Key(
        "disable_allgather",
        Bool(),
        Support.NO_EFFECT,
        "DeepSpeed ignores it as well",
        default=False,
        origin=Origin.LEGACY,
    ),
    Key(
        "allgather_size",
        Int(1),
        Support.NO_EFFECT,
        "the size is zero_optimization.allgather_bucket_size",
        origin=Origin.LEGACY,
    ),
)
