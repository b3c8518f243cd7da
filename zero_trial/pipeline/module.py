"""A pipeline module: a list of layers; each pipeline rank builds only its own layers."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise, product
from math import prod
from typing import Any

import torch
from torch import nn

from zero_trial.activation_checkpointing import checkpoint
from zero_trial.comm import is_distributed, rank_and_size
from zero_trial.errors import ConfigError, TrialError
from zero_trial.pipeline.layers import (
    Chunk,
    Layer,
    LayerSeeds,
    LayerSpec,
    Recompute,
    TiedLayerSpec,
    layer_facts,
    layer_times,
    partition,
    tied_chunks,
)
from zero_trial.pipeline.schedule import ChunkPlacement

LossFunction = Callable[[Any, Any], torch.Tensor]

LossWeight = Callable[[Any, Any], float | torch.Tensor]

_BUILDER: ContextVar[Callable[[PipelineModule, ChunkPlacement], None] | None] = ContextVar("_BUILDER", default=None)


class PipelineModule(nn.Module):
    """A sequence of layers: specs (built only on the ranks that need them), modules, and functions
    of one argument, in any combination.

    ``num_stages``: the number of pipeline stages; None uses ds_config's ``mesh.pipe`` when
    ``initialize`` builds the layers. ``topology`` also sets it.

    ``loss_fn(output, label)``: without it, the last layer's output is the loss.

    ``loss_weight(output, label)``: the weight of the loss, if the loss is a sum (for example, its
    number of tokens). A step divides the sum of the losses by the sum of the weights.

    ``seed_layers``: build layer i after ``seed_fn(base_seed + i)``, so that weights do not depend
    on the number of stages.

    ``partition_method``: uniform, parameters, type:REGEX, or profile, which requires
    ``profile_input`` and runs it through the layers.

    ``activation_checkpoint_interval``: recompute this many layers at a time in backward, with
    ``activation_checkpoint_func``; 0 recomputes none.

    ``chunks_per_rank``: parts of the model per rank, for interleaved schedules. ``placement``: a
    placement other than round-robin (ZB-V's). ``dynamic_shape`` is accepted for compatibility:
    shapes are sent with every message and may always vary.

    With one stage, the result is an ordinary module: ``module(x)`` returns the last layer's output.
    All parameters of a tied module are tied, whatever ``tied_weight_attr`` names, so that the
    number of stages does not change the results. Raises ConfigError.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: LossFunction | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = True,
        *,
        chunks_per_rank: int = 1,
        placement: ChunkPlacement | None = None,
        profile_input: Any = None,
        loss_weight: LossWeight | None = None,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self.num_stages = _stages(num_stages, topology, placement)
        self.seed_layers = seed_layers
        self.base_seed = base_seed
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = tuple(checkpointable_layers) if checkpointable_layers is not None else None
        self.dynamic_shape = dynamic_shape
        self.chunks_per_rank = chunks_per_rank
        self.parts: list[int] = []  # boundaries of the chunks
        self.ties: dict[str, tuple[int, ...]] = {}  # key -> the chunks that hold it
        self.placement: ChunkPlacement | None = None
        self.stage_id = 0
        self._layers = list(layers)
        self._seeds = LayerSeeds(base_seed, seed_fn or torch.manual_seed) if seed_layers else None
        self._topology = topology
        self._profile_input = profile_input
        self._chunks: dict[int, Chunk] = {}  # not registered: the layers are, under their own names
        # names of the children that are layers; other children belong to the user
        self._built: list[str] = []
        wanted = placement or (ChunkPlacement.loop(self.num_stages, chunks_per_rank) if self.num_stages else None)
        if wanted is not None and wanted.stages > 1 and (build := _BUILDER.get()) is not None:
            build(self, wanted)
        elif wanted is not None and (stage := self._stage_here(wanted)) is not None:
            self.build(wanted, stage)

    @classmethod
    def from_sequential(cls, model: nn.Sequential, num_stages: int | None = None, **options: Any) -> PipelineModule:
        """Return a pipeline with the children of an ``nn.Sequential`` as layers."""
        return cls(list(model), num_stages, **options)

    @classmethod
    def from_blocks(
        cls,
        embed: Layer | Sequence[Layer],
        blocks: Sequence[Layer],
        head: Layer | Sequence[Layer],
        num_stages: int | None = None,
        **options: Any,
    ) -> PipelineModule:
        """Return a transformer as a pipeline: ``embed``, ``blocks``, ``head``. Options are those of
        the class."""
        return cls([*_listed(embed), *blocks, *_listed(head)], num_stages, **options)

    # --- building ---------------------------------------------------------------------------------

    def build(
        self,
        placement: ChunkPlacement,
        stage: int,
        *,
        partition_method: str | None = None,
        activation_checkpoint_interval: int | None = None,
    ) -> None:
        """Build the layers of pipeline rank ``stage`` under ``placement``, and drop those built
        before.

        A no-op if both are the same. Collective over the world if the partition is measured.
        """
        method = partition_method or self.partition_method
        if activation_checkpoint_interval is not None:
            self.activation_checkpoint_interval = activation_checkpoint_interval
        _refuse_init()
        self._refuse_parameters_outside_layers(placement)
        if (placement, stage, method) != (self.placement, self.stage_id, self.partition_method) or not self._chunks:
            self._forget()
            self.placement, self.stage_id, self.partition_method = placement, stage, method
            self.parts = self._cut(method, placement.chunks)
            self.ties = tied_chunks(self._layers, self.parts)
            _refuse_shared(self._layers, self.parts)
            self._build_chunks(placement.of(stage))
        self.num_stages = placement.stages
        recompute = self._recompute()
        for chunk in self._chunks.values():
            chunk.set_recompute(recompute)

    @property
    def layers_as_modules(self) -> list[nn.Module]:
        """Return the layers that were passed as modules; every rank holds all of them."""
        return [layer for layer in self._layers if isinstance(layer, nn.Module)]

    def unbuilt(self) -> PipelineModule:
        """Return a new pipeline with the same layers and settings, but nothing built. Layers that
        were passed as modules are shared, not copied."""
        return PipelineModule(
            self._layers,
            loss_fn=self.loss_fn,
            loss_weight=self.loss_weight,
            seed_layers=self.seed_layers,
            seed_fn=self._seeds.function if self._seeds is not None else None,
            base_seed=self.base_seed,
            partition_method=self.partition_method,
            activation_checkpoint_interval=self.activation_checkpoint_interval,
            activation_checkpoint_func=self.activation_checkpoint_func,
            checkpointable_layers=self.checkpointable_layers,
            profile_input=self._profile_input,
        )

    def build_whole(self) -> None:
        """Build all layers on this rank as a pipeline of one stage. Each call builds them again."""
        method = self.partition_method
        self._forget()
        # uniform: with a single part there is nothing to measure
        self.build(ChunkPlacement.loop(1), 0, partition_method="uniform")
        self.partition_method = method

    def _build_chunks(self, numbers: Sequence[int]) -> None:
        tied = nn.ModuleDict()
        for number in numbers:
            first, after = self.parts[number], self.parts[number + 1]
            chunk = Chunk(self._layers, first, after, tied=tied, seeds=self._seeds, seeds_forward=True)
            self._chunks[number] = chunk
            for name, layer in chunk.named_children():
                if layer is not tied:
                    self.add_module(name, layer)
                    self._built.append(name)
        if len(tied):
            self.tied_modules = tied
            self._built.append("tied_modules")

    def _forget(self) -> None:
        for name in self._built:
            delattr(self, name)
        self._built.clear()
        self._chunks.clear()

    def children_outside_layers(self) -> dict[str, nn.Module]:
        """Return the children that are not layers, by name, such as a loss function's module."""
        return {name: child for name, child in self.named_children() if name not in self._built}

    def _refuse_parameters_outside_layers(self, placement: ChunkPlacement) -> None:
        """Raise ConfigError if several stages hold a child with parameters that is not a layer."""
        for name, child in self.children_outside_layers().items() if placement.stages > 1 else ():
            if next(child.parameters(), None) is not None:
                raise ConfigError(
                    "a module outside of the pipeline's layers has parameters, and each stage would train its own copy",
                    where=f"PipelineModule.{name}",
                    got=type(child).__name__,
                    expected="parameters in layers only; buffers may be anywhere",
                    fix="Make it a layer (LayerSpec), or a TiedLayerSpec if several stages use it.",
                )

    def _cut(self, method: str, parts: int) -> list[int]:
        times = None
        if method.strip().lower() == "profile":
            times = layer_times(self._layers, self._profile_input, self._seeds)
        return partition(method, [layer_facts(layer) for layer in self._layers], parts, times)

    def _recompute(self) -> Recompute | None:
        interval = self.activation_checkpoint_interval
        if not interval:
            return None
        return Recompute(interval, self.activation_checkpoint_func, self.checkpointable_layers)

    def _stage_here(self, placement: ChunkPlacement) -> int | None:
        """Return this process's pipeline rank; None before ``initialize`` sets it."""
        if placement.stages == 1:
            return 0
        rank, size = rank_and_size()
        if not is_distributed() or size % placement.stages:
            return None
        if self._topology is not None and self._topology.world_size() == size:
            return int(self._topology.get_coord(rank).pipe)
        return rank // (size // placement.stages)

    # --- the built part ---------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        return bool(self._chunks)

    @property
    def chunks(self) -> dict[int, Chunk]:
        """Return this rank's chunks by number."""
        return dict(self._chunks)

    def forward(self, value: Any) -> Any:
        """Return the output of this rank's layers, without the loss."""
        if not self._chunks:
            raise _not_built("forward")
        numbers = list(self._chunks)
        if len(numbers) > 1 and (self.num_stages or 1) > 1:
            raise TrialError(
                "this rank's layers are not consecutive",
                where="PipelineModule.forward",
                got=f"chunks {numbers} of {len(self.parts) - 1}",
                fix="Run the pipeline with engine.train_batch() or engine.eval_batch().",
            )
        for chunk in self._chunks.values():
            value = chunk(value)
        return value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters. Raises ConfigError before layers are built: nothing would train."""
        if not self._chunks:
            raise _not_built("parameters")
        return super().named_parameters(prefix, recurse, remove_duplicate)

    @property
    def total_parameters(self) -> int:
        """Return the trainable elements of the whole model; a tied weight counts once."""
        facts = [(layer, layer_facts(layer).elements) for layer in self._layers]
        tied = {layer.key: elements for layer, elements in facts if isinstance(layer, TiedLayerSpec)}
        return sum(tied.values()) + sum(elements for layer, elements in facts if not isinstance(layer, TiedLayerSpec))

    def num_pipeline_stages(self) -> int | None:
        return self.num_stages

    def topology(self) -> ProcessTopology | None:
        """Return the topology that was given."""
        return self._topology


@contextmanager
def pipelines_built_by(build: Callable[[PipelineModule, ChunkPlacement], None]) -> Iterator[None]:
    """Call ``build`` on each PipelineModule that is created with several stages in this context: a
    dry run has no other ranks that could build theirs."""
    token = _BUILDER.set(build)
    try:
        yield
    finally:
        _BUILDER.reset(token)


def _stages(number: int | None, topology: ProcessTopology | None, placement: ChunkPlacement | None) -> int | None:
    known = {
        name: value
        for name, value in (
            ("num_stages", number),
            ("topology", topology.get_dim("pipe") if topology is not None else None),
            ("placement", placement.stages if placement is not None else None),
        )
        if value is not None
    }
    if len(set(known.values())) > 1 or any(value < 1 for value in known.values()):
        got = ", ".join(f"{name} {value}" for name, value in known.items())
        raise ConfigError(
            "the number of pipeline stages is unknown", where="PipelineModule", got=got, expected="one number"
        )
    return next(iter(known.values()), None)


def _refuse_init() -> None:
    """Raise ConfigError inside ``zero.Init``, which requires all ranks to build the same modules:
    ranks of a pipeline would deadlock."""
    modes = torch.overrides._get_current_function_mode_stack()
    if any(getattr(mode, "cuts_parameters", False) for mode in modes):
        raise ConfigError(
            "a pipeline cannot be built inside zero.Init",
            where="PipelineModule",
            fix="Remove the block: each rank builds only its own layers.",
        )


def _listed(layers: Layer | Sequence[Layer]) -> list[Layer]:
    return list(layers) if isinstance(layers, (list, tuple)) else [layers]


def _refuse_shared(layers: Sequence[Layer], parts: Sequence[int]) -> None:
    """Raise ConfigError if built modules of two chunks share a parameter."""
    holder: dict[int, tuple[int, int]] = {}
    for chunk, (first, after) in enumerate(pairwise(parts)):
        for index in range(first, after):
            layer = layers[index]
            for param in layer.parameters() if isinstance(layer, nn.Module) else ():
                other, before = holder.setdefault(id(param), (chunk, index))
                if other != chunk:
                    raise ConfigError(
                        "two layers in different parts of a pipeline share a parameter",
                        where="PipelineModule",
                        got=f"layers {before} and {index}",
                        fix="Define both with TiedLayerSpec and the same key.",
                    )


def _not_built(what: str) -> ConfigError:
    return ConfigError(
        "the layers are not built yet",
        where=f"PipelineModule.{what}",
        fix="Pass num_stages (or a topology) after torch.distributed is initialized, or let initialize() build the layers: without "
        "model_parameters it trains all of them.",
    )


__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


# --- topologies under DeepSpeed's names -----------------------------------------------------------


class ProcessTopology:
    """A grid of ranks, row by row: the last axis changes fastest.

    ``mapping`` maps a coordinate (a named tuple of the axes) to its rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ConfigError(
                "a topology needs distinct axes with a size of 1 or more each",
                where="topology",
                got=f"axes {list(axes)}, dims {list(dims)}",
            )
        self.axes = list(axes)
        self.dims = list(dims)
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinate
        self.mapping: dict[Any, int] = {
            coordinate(*place): rank for rank, place in enumerate(product(*(range(dim) for dim in self.dims)))
        }
        self._places = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate of all axes. Raises ConfigError."""
        if set(coord_kwargs) != set(self.axes):
            raise ConfigError(
                "get_rank needs every axis", where="topology", got=sorted(coord_kwargs), expected=self.axes
            )
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ConfigError("no rank has this coordinate", where="topology", got=place, expected=f"below {self.dims}")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """Return the axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinate as in DeepSpeed's checkpoint file names, such as ``model_00``."""
        place = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if the axis does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank, a named tuple."""
        if not 0 <= rank < len(self._places):
            raise ConfigError(
                "no such rank in the topology", where="topology", got=rank, expected=f"0 to {len(self._places) - 1}"
            )
        return self._places[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only on this axis and communicate along it. Empty
        if the axis does not exist."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        sizes = (range(self.get_dim(name)) for name in others)
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in product(*sizes)]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose coordinates have these values."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == at for axis, at in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose coordinate on ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines with adjacent data-parallel ranks, so that gradients stay within a host."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallelism; model-parallel ranks are adjacent."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
