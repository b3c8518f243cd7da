"""ds_config keys of sharding (what, in which sizes, over which axes) and offloading."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from zero_trial.ds_config.key import Origin, mapped, no_effect, not_yet, ours, refused, section, supported
from zero_trial.schema.types import Bool, Float, Int, Names, Reading, Text, Type, ValidationError

_QUANTIZED = "quantized communication is not implemented, and it changes results"


@dataclass(frozen=True)
class LeafModuleSection:
    """``zero_optimization.leaf_module``: modules that are gathered and freed as a single block."""

    classes: tuple[str, ...] = supported((), Names(), "class names, bare or with their module")
    names: tuple[str, ...] = supported((), Names(), "dotted module names")
    name_suffixes: tuple[str, ...] = supported((), Names(), "ends of dotted module names")


@dataclass(frozen=True)
class Folders(Type):
    """A folder, several comma-separated folders, or a list of folders."""

    def describe(self) -> str:
        return "a folder or a list of folders"

    def read(self, value: object) -> Reading:
        named = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        folders = tuple(named) if isinstance(named, list | tuple) else ()
        texts = all(isinstance(each, str) and each for each in folders)
        if texts and isinstance(value, str) and len({each.startswith("/") for each in folders}) > 1:
            raise ValidationError(f'{self.describe()}; write a name with a comma as a list: ["{value}"]')
        if folders and texts and len(set(folders)) == len(folders):
            return Reading(folders)
        raise ValidationError(f"{self.describe()}, each once")


_NVME_PATH = "folder of the files, one file per rank; several folders, one per drive, share the contents"


@dataclass(frozen=True)
class OffloadOptimizerSection:
    """``zero_optimization.offload_optimizer``: where optimizer state lives between steps."""

    device: str = supported(
        "none",
        Text(("none", "cpu", "nvme")),
        "nvme: fp32 masters and moments live in a file; cpu: in host memory, where CPU ranks have them anyway. Updates run on the CPU, except "
        "those of whole tensors (Muon)",
    )
    nvme_path: tuple[str, ...] | None = supported(None, Folders(), _NVME_PATH)
    buffer_count: int = supported(
        4, Int(1), "number of buffers through which offloaded state passes; 3 let reading, updating and writing overlap"
    )
    pin_memory: bool = supported(
        True,
        Bool(),
        "the buffers between a GPU and its host are pinned; CPU ranks have none",
        was="false",
    )
    ratio: float = supported(
        1.0,
        Float(low=0, high=1),
        "nvme: at most this fraction of the state goes to the file, in whole parameter groups; on a GPU all of it leaves the device",
    )


@dataclass(frozen=True)
class OffloadParamSection:
    """``zero_optimization.offload_param``: where parameters live between uses."""

    device: str = supported(
        "none",
        Text(("none", "cpu", "nvme")),
        "nvme: a rank's shards at ZeRO stage 3, its full copy at stages 0 to 2, live in a file; cpu: in host "
        "memory, where CPU ranks have them anyway",
    )
    nvme_path: tuple[str, ...] | None = supported(None, Folders(), _NVME_PATH)
    buffer_count: int = supported(5, Int(1), "number of buffers into which parameters are read ahead of their use")
    buffer_size: int = supported(
        100_000_000,
        Int(1, unit="elements"),
        "maximum number of elements in a buffer; fewer if parameter groups are smaller, or if all buffers together would hold more than a "
        "quarter of them",
    )
    max_in_cpu: int = supported(
        1_000_000_000,
        Int(0, unit="elements"),
        "nvme: number of elements of a rank's parameters that stay in memory (a GPU's in host memory); with 0 all parameters that are freed "
        "between uses go to the file",
    )
    pin_memory: bool = supported(
        True, Bool(), "for a GPU: the host memory that parameters are copied from and to is pinned", was="false"
    )


@dataclass(frozen=True)
class ZeroSection:
    """``zero_optimization``: the ZeRO stage and its sizes."""

    stage: int = supported(
        0, Int(0, 3), "0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters"
    )
    contiguous_gradients: bool = no_effect(True, Bool(), "gradients always land in flat buffers")
    reduce_scatter: bool = no_effect(
        True, Bool(), "gradients are always reduce-scattered, never all-reduced and then sliced"
    )
    reduce_bucket_size: int = supported(
        500_000_000, Int(1, unit="elements"), "an upper limit; the buffer is never larger than the model needs"
    )
    allgather_bucket_size: int = not_yet(
        500_000_000,
        Int(1, unit="elements"),
        "parameters are gathered group by group: up to ZeRO stage 2 reduce_bucket_size limits a group of several parameters; at stage 3 a group "
        "is a block of the model, whatever its size",
    )
    overlap_comm: bool | None = supported(
        None,
        Bool(),
        "true or null: gradients are reduced while the backward pass continues; false: the backward pass waits for each reduction. engine.step() "
        "always returns with all parameters updated",
    )
    load_from_fp32_weights: bool = refused(
        True, Bool(), "loading takes the fp32 master weights of the checkpoint", instead="Remove the key."
    )
    prefetch_bucket_size: int = supported(
        50_000_000,
        Int(0, unit="elements"),
        "maximum number of elements that are gathered ahead of their use",
        aliases=("stage3_prefetch_bucket_size",),
    )
    param_persistence_threshold: int = supported(
        100_000,
        Int(0, unit="elements"),
        "parameters up to this size stay gathered",
        aliases=("stage3_param_persistence_threshold",),
    )
    model_persistence_threshold: int = supported(
        sys.maxsize,
        Int(0, unit="elements"),
        "maximum number of elements that stay gathered in total",
        aliases=("stage3_model_persistence_threshold",),
    )
    max_live_parameters: int = supported(
        1_000_000_000,
        Int(0, unit="elements"),
        "maximum number of elements that are gathered at one time, not counting the block that computes; 0 frees every parameter after each use, "
        "also those outside the blocks between forward and backward",
        aliases=("stage3_max_live_parameters",),
    )
    max_reuse_distance: int = supported(
        1_000_000_000,
        Int(0, unit="elements"),
        "a parameter that is used again within this distance is not freed: in backward, or in the next micro-batch of "
        "the step; 0 frees every parameter after each use",
        aliases=("stage3_max_reuse_distance",),
    )
    gather_16bit_weights_on_model_save: bool = supported(
        False,
        Bool(),
        "return value of engine.zero_gather_16bit_weights_on_model_save(): libraries check it before they save a whole model, which works at "
        "every stage",
        aliases=("stage3_gather_16bit_weights_on_model_save",),
    )
    stage3_gather_fp16_weights_on_model_save: ClassVar = mapped(
        False,
        Bool(),
        "the old spelling",
        aliases=("gather_fp16_weights_on_model_save",),
        becomes="zero_optimization.gather_16bit_weights_on_model_save",
    )
    module_granularity_threshold: int = supported(
        0,
        Int(0, unit="elements"),
        "minimum size of a parameter group at ZeRO stage 3: smaller neighboring blocks are merged; 0 means 131072, 1 makes every block a group",
        aliases=("stage3_module_granularity_threshold",),
    )
    ignore_unused_parameters: bool = supported(
        True,
        Bool(),
        "true: the gradient of an unused parameter is zero; false: a step in which a trainable parameter got no gradient is an error, at every "
        "stage",
    )
    leaf_module: LeafModuleSection = section(
        LeafModuleSection,
        "modules that are gathered as one block; DeepSpeed lists three mixture-of-experts "
        "classes by default, zero_trial none",
    )
    reduce_every: str = ours(
        "auto",
        Text(("auto", "micro", "boundary")),
        "when gradients are reduced: after every micro-batch (least memory) or at the "
        "accumulation boundary (least traffic)",
    )
    reshard_after: str = ours(
        "auto",
        Text(("auto", "forward", "step")),
        "ZeRO stage 3: when gathered parameters are freed: after each use (forward: least memory), after the step (step: least traffic), or, "
        "while they are within max_live_parameters and max_reuse_distance, after the last backward of the step (auto)",
    )
    set_grads_to_none: bool = ours(
        False,
        Bool(),
        "ZeRO stages 2 and 3: gradient shards and the buffers of gradients in flight have no memory between steps; each step allocates them again",
    )
    elementwise_optimizer: bool = ours(
        False,
        Bool(),
        "the optimizer passed to initialize works element by element, so its tensors are split evenly over the ranks; by default an unknown "
        "class gets whole tensors, each updated by one rank",
    )
    mics_shard_size: int | None = supported(
        None,
        Int(-1, unit="ranks"),
        "the size of the shard axis; the other ranks are replicas. -1 means no limit",
        harmless=(-1,),
        origin=Origin.LEGACY,
    )
    zero_hpz_partition_size: int = not_yet(
        1,
        Int(1, unit="ranks"),
        "parameters are gathered over the whole shard axis; use mics_shard_size or mesh.shard for hybrid sharding",
    )
    zero_quantized_weights: bool = refused(False, Bool(), _QUANTIZED, instead="Remove the key.")
    zero_quantized_nontrainable_weights: bool = refused(False, Bool(), _QUANTIZED, instead="Remove the key.")
    zero_quantized_gradients: bool = refused(False, Bool(), _QUANTIZED, instead="Remove the key.")
    offload_optimizer: OffloadOptimizerSection | None = section(
        OffloadOptimizerSection, "where optimizer state lives between steps", optional=True
    )
    offload_param: OffloadParamSection | None = section(
        OffloadParamSection, "where parameter shards live between uses", optional=True
    )
    sub_group_size: int = supported(
        1_000_000_000,
        Int(1, unit="elements"),
        "maximum number of elements of offloaded state in a buffer; fewer if all buffers together would hold more than a quarter of it",
    )
    cpu_offload: ClassVar = mapped(False, Bool(), "the old spelling", becomes="zero_optimization.offload_optimizer")
    cpu_offload_param: ClassVar = mapped(
        False,
        Bool(),
        "the old spelling",
        aliases=("cpu_offload_params",),
        becomes="zero_optimization.offload_param",
    )


@dataclass(frozen=True)
class MeshSection:
    """``mesh``: axis sizes; ``None`` is derived from the number of ranks and the ZeRO stage."""

    shard: int | None = ours(
        None,
        Int(1, unit="ranks"),
        "ranks that share one copy of the state; null means all data-parallel ranks (1 at ZeRO stage 0)",
    )
    replica: int | None = ours(None, Int(1, unit="ranks"), "copies of the sharded state; null means derived")
    pipe: int = ours(
        1,
        Int(1, unit="pipeline stages"),
        "stages into which the layers of a PipelineModule are split; each stage has the ranks of the other axes",
    )
    model: int = ours(1, Int(1, unit="ranks"), "ranks of a model-parallel group, which see the same data")


@dataclass(frozen=True)
class AioSection:
    """``aio``: reads and writes of state on an NVMe disk."""

    block_size: int = supported(1_048_576, Int(1, unit="bytes"), "bytes per request; rounded up to blocks of 4096")
    queue_depth: int = supported(8, Int(1, 1024), "requests in flight per folder, each in its own thread")
    intra_op_parallelism: int = supported(
        1, Int(1, 64), "the number of threads per folder is this number times queue_depth", aliases=("thread_count",)
    )


@dataclass(frozen=True)
class ZeroKeys:
    """The keys of sharding and offloading."""

    zero_optimization: ZeroSection = section(
        ZeroSection, "what is sharded over the data-parallel ranks; a bare true means stage 1", switch="stage"
    )
    mesh: MeshSection = section(MeshSection, "the sizes of the axes of the ranks", origin=Origin.OURS)
    aio: AioSection = section(AioSection, "it tunes reads and writes of NVMe offload")
