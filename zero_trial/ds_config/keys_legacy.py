"""ds_config keys: keys that DeepSpeed removed, never implemented, or that few people use: each has
an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zero_trial.ds_config.key import Origin, no_effect, refused
from zero_trial.schema.types import Bool, Int, Opaque


@dataclass(frozen=True)
class LegacyKeys:
    """Keys that DeepSpeed removed, never implemented, or that few people use: each has an
    answer."""

    compression_training: ClassVar = refused(
        None,
        Opaque(),
        "it quantises or prunes the model while it is trained; removed from DeepSpeed in 0.19.8",
        instead="Set enabled: false in each of its parts, or remove the section.",
        origin=Origin.LEGACY,
    )
    quantize_training: ClassVar = refused(
        None,
        Opaque(),
        "it quantises the weights while they are trained; removed from DeepSpeed in 0.19.8",
        instead="Set enabled: false, or remove the section.",
        origin=Origin.LEGACY,
    )
    progressive_layer_drop: ClassVar = refused(
        None,
        Opaque(),
        "it drops layers while training; removed from DeepSpeed in 0.19.8",
        instead="Set enabled: false, or remove the section.",
        origin=Origin.LEGACY,
    )
    curriculum_learning: ClassVar = refused(
        None,
        Opaque(),
        "it changes the sequence length while training; removed from DeepSpeed in 0.19.8",
        instead="Set enabled: false, and cut the sequences in the data loader.",
        origin=Origin.LEGACY,
    )
    elasticity: ClassVar = refused(
        None,
        Opaque(),
        "it changes the batch size with the number of ranks; removed from DeepSpeed in 0.19.8",
        instead="Set enabled: false and train_batch_size: checkpoints resume on any number of "
        "ranks with the same batch.",
        origin=Origin.LEGACY,
    )
    data_efficiency: ClassVar = refused(
        None,
        Opaque(),
        "it samples the data and drops tokens while training; it does not exist here",
        instead="Set enabled: false, and use a sampler of your own.",
    )
    hybrid_engine: ClassVar = refused(
        None,
        Opaque(),
        "it switches between training and generation kernels; it does not exist here",
        instead="Set enabled: false, or remove the section.",
    )
    zenflow: ClassVar = refused(
        None, Opaque(), "ZenFlow updates with stale gradients; it does not exist here", instead="Remove the section."
    )
    sparse_attention: ClassVar = no_effect(
        None,
        Opaque(),
        "DeepSpeed only passed it on to models that asked for it; removed there in 0.19.8",
        origin=Origin.LEGACY,
    )
    eigenvalue: ClassVar = no_effect(
        None, Opaque(), "it only steered quantize_training; removed from DeepSpeed in 0.19.8", origin=Origin.LEGACY
    )
    graph_harvesting: ClassVar = no_effect(
        None, Opaque(), "it only recorded CUDA graphs; removed from DeepSpeed in 0.19.8", origin=Origin.LEGACY
    )
    nebula: ClassVar = no_effect(
        None,
        Opaque(),
        "checkpoints are written by zero_trial's own writer; removed from DeepSpeed in 0.19.8",
        origin=Origin.LEGACY,
    )
    datastates_ckpt: ClassVar = no_effect(None, Opaque(), "checkpoints are written by zero_trial's own writer")
    weight_quantization: ClassVar = no_effect(None, Opaque(), "it is for inference", origin=Origin.LEGACY)
    vocabulary_size: ClassVar = no_effect(
        None, Int(1), "DeepSpeed only warns about its alignment", origin=Origin.LEGACY
    )
    cuda_visible_devices: ClassVar = no_effect(
        None, Opaque(), "the launcher decides which devices a rank sees", origin=Origin.LEGACY
    )
    use_data_before_expert_parallelism: ClassVar = no_effect(
        False, Bool(), "expert parallelism does not exist here", aliases=("use_data_before_expert_parallel",)
    )
    disable_allgather: ClassVar = no_effect(False, Bool(), "DeepSpeed ignores it as well", origin=Origin.LEGACY)
    allgather_size: ClassVar = no_effect(
        None, Int(1), "the size is zero_optimization.allgather_bucket_size", origin=Origin.LEGACY
    )
    local_rank: ClassVar = no_effect(
        None, Int(-1), "the launcher gives each rank its own (LOCAL_RANK)", origin=Origin.LEGACY
    )
