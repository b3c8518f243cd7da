"""Build a pipeline: settings, this rank's layers, ZeRO policy and sharding actions."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from zero_trial.comm import AxisComm, Mesh, open_direction_groups, part_of_pipe
from zero_trial.device import is_accelerator
from zero_trial.ds_config.keys_running import LIFETIMES, REDUCTIONS, RESHARDS
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import ResolvedConfig, home_of_parameters
from zero_trial.errors import ConfigError
from zero_trial.pipeline.lowering import Sharding, ZeroPolicy, choose, lower
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import RECIPES, ChunkPlacement, ParameterLifetime, ReductionTiming, Schedule, build
from zero_trial.pipeline.simulator import validate
from zero_trial.sharding.grouping import ManualGroup
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.plan import ReduceAt, plan_for_stage

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class PipelineSettings:
    """The pipeline settings in ds_config.

    ``parameters`` and ``reduction``: None selects what communicates least. ``partition_method``
    None and an interval of 0 select the module's own values.
    """

    stages: int = 1
    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    parameters: ParameterLifetime | None = None
    reduction: ReductionTiming | None = None
    partition_method: str | None = None
    activation_checkpoint_interval: int = 0


@dataclass(frozen=True)
class ResolvedPipeline:
    """What only a pipeline's engine needs. ``channel`` distinguishes its messages from others."""

    settings: PipelineSettings
    policy: ZeroPolicy
    price: str  # one line about the cost of schedule and policy
    manual_groups: tuple[ManualGroup, ...]
    channel: int


def pipeline_settings(config: DsConfig, device: str = "cpu") -> PipelineSettings:
    """Read ``pipeline`` and ``mesh.pipe`` for ranks that compute on ``device``; if the policy
    leaves something open, ``reduce_every`` and ``reshard_after`` decide."""
    section, zero = config.pipeline, config.zero_optimization
    given = (section.zero_policy, RESHARDS.get(zero.reshard_after), zero.reduce_every)
    held = next((value for value in given if value in LIFETIMES), None)
    when = next((value for value in given if value in REDUCTIONS), None)
    chunks = section.chunks_per_rank
    return PipelineSettings(
        stages=config.mesh.pipe,
        schedule=section.schedule,
        chunks_per_rank=chunks if isinstance(chunks, int) else RECIPES[section.schedule].chunks,
        parameters=ParameterLifetime(held)
        if held is not None and plan_for_stage(zero.stage, home=home_of_parameters(config, device)).frees_parameters
        else None,
        reduction=ReductionTiming(when) if when is not None else None,
        partition_method=section.partition_method,
        activation_checkpoint_interval=section.activation_checkpoint_interval,
    )


# --- layers and policy ----------------------------------------------------------------------------


def with_stages(config: DsConfig, model: nn.Module) -> DsConfig:
    """Return ``config`` with the number of pipeline stages that the model was built for, if
    ds_config does not set it. Raises ConfigError if they differ."""
    if not isinstance(model, PipelineModule):
        if config.mesh.pipe > 1:
            raise ConfigError(
                "only a PipelineModule can be split into pipeline stages",
                where="mesh.pipe",
                got=f"{config.mesh.pipe} stages for a {type(model).__name__}",
                fix="Wrap the layers in a zero_trial.PipelineModule, or remove mesh.pipe.",
            )
        return config
    if model.num_stages is None or model.num_stages == config.mesh.pipe:
        return config
    if not config.source("mesh.pipe").is_default:
        raise ConfigError(
            "ds_config and the model disagree about the pipeline stages",
            where="mesh.pipe",
            got=config.mesh.pipe,
            expected=f"{model.num_stages}, the num_stages of the PipelineModule",
        )
    return replace(config, mesh=replace(config.mesh, pipe=model.num_stages))


def build_layers(model: PipelineModule, config: DsConfig, mesh: Mesh, *, has_parameters: bool) -> None:
    """Build this rank's layers for ds_config's schedule. ``has_parameters``: the caller has
    references to parameters of layers that already exist."""
    settings, stage = pipeline_settings(config), mesh.coordinates["pipe"]
    _check_topology(model, mesh)
    placement = RECIPES[settings.schedule].place(settings.stages, settings.chunks_per_rank)
    method = settings.partition_method or model.partition_method
    same = (model.placement, model.stage_id, model.partition_method) == (placement, stage, method)
    if model.built and not same and has_parameters:
        raise ConfigError(
            "the optimizer's layers are not those that this schedule places on this rank",
            where="pipeline.schedule",
            got=f"{settings.schedule} with {settings.chunks_per_rank} chunks per rank, partition {method}",
            fix=f"Build PipelineModule(placement=..., partition_method={method!r}) for this schedule, or omit model_parameters to train all "
            "parameters.",
        )
    model.build(
        placement,
        stage,
        partition_method=method,
        activation_checkpoint_interval=settings.activation_checkpoint_interval or None,
    )


def _check_topology(model: PipelineModule, mesh: Mesh) -> None:
    topology = model.topology()
    if topology is None or topology.world_size() != mesh.world.size:
        return
    stage = int(topology.get_coord(mesh.rank).pipe)
    if stage != mesh.coordinates["pipe"]:
        raise ConfigError(
            "the topology puts this rank at a different pipeline stage than the mesh",
            where="PipelineModule(topology)",
            got=f"rank {mesh.rank} at stage {stage}",
            expected=f"stage {mesh.coordinates['pipe']}",
            fix="Make pipe the topology's first axis, as in PipeDataParallelTopology.",
        )


def resolve_pipeline(
    model: PipelineModule, config: DsConfig, mesh: Mesh, resolved: ResolvedConfig, device: torch.device
) -> tuple[ResolvedConfig, ResolvedPipeline]:
    """Choose the policy; return ``resolved`` with its plan. Collective over the world."""
    settings = pipeline_settings(config, device.type)
    policy = choose(Sharding(*resolved.plan.cuts), settings.parameters, settings.reduction)
    price = price_line(settings, policy, resolved.batch.accumulation, mesh.data.size, config.zero_optimization.stage)
    if mesh.rank == 0:
        log.info("%s", price)
    plan = resolved.plan.scheduled(reduce_at=ReduceAt(policy.reduction.value))
    if is_accelerator(device) and mesh.pipe.size > 1 and model.placement is not None:
        open_direction_groups(mesh, hops_of(model.placement))
    channel = int(mesh.world.gather_json(secrets.randbits(11), "channel")[0])
    groups = tuple(manual_groups(model, mesh))
    pipeline = ResolvedPipeline(settings, policy, price, manual_groups=groups, channel=channel)
    return replace(resolved, plan=plan), pipeline


def price_line(settings: PipelineSettings, policy: ZeroPolicy, micro_batches: int, ranks: int, zero_stage: int) -> str:
    """Describe schedule, bubble, policy and cost among ``ranks`` data-parallel ranks."""
    report = validate(training_schedule(settings, policy, micro_batches))
    chunks = settings.chunks_per_rank
    text = (
        f"pipeline: {settings.schedule}, {settings.stages} stages x {chunks} chunk{'s' * (chunks > 1)}, {micro_batches} micro-batches, "
        f"bubble {report.bubble:.1%}; ZeRO-{zero_stage}, {policy.describe()}"
    )
    if ranks == 1:
        return text
    volume = max(policy.volume(rank, chunks) for rank in report.ranks)
    return f"{text}, {volume:g} x (D-1)/D of a stage's parameters moved per step, D = {ranks}"


def training_schedule(
    settings: PipelineSettings, policy: ZeroPolicy, micro_batches: int, ties: Sequence[Sequence[int]] = ()
) -> Schedule:
    """Build the schedule of one step under a policy, including messages, sharding and the step
    itself. Raises ConfigError for combinations that the recipe does not support."""
    computed = build(settings.schedule, settings.stages, micro_batches, settings.chunks_per_rank)
    return lower(computed, parameters=policy.parameters, reduction=policy.reduction, ties=ties)


def hops_of(placement: ChunkPlacement) -> list[tuple[int, int]]:
    """Return (from stage, to stage) of all messages, in both directions."""
    borders = dict.fromkeys((a, b) for a, b in pairwise(placement.ranks) if a != b)
    return list(dict.fromkeys([*borders, *((b, a) for a, b in borders)]))


# --- parameter groups of chunks and tied modules, and the sharding actions on them ----------------


def manual_groups(module: PipelineModule, mesh: Mesh) -> list[ManualGroup]:
    """Return a group for each chunk of this rank and for each of its tied modules. Collective over
    the world if weights are tied."""
    placement = module.placement
    found = []
    tied: set[int] = set()
    for key, chunks in module.ties.items():
        holders = [placement.ranks[chunk] for chunk in chunks] if placement is not None else [0]
        stages = sorted(set(holders))
        copies: AxisComm | None = None
        if len(stages) > 1:
            copies = part_of_pipe(mesh, tuple(stages), f"tied.{key}")
        if module.stage_id in stages:
            own = frozenset(id(param) for param in module.tied_modules[key].parameters())
            tied |= own
            # the owner has the first of the tied layers, as in an unsplit model
            owner = stages.index(holders[0])
            found.append(ManualGroup(tied_group(key), own, copies, owner, f"tied_modules.{key}"))
    for number, chunk in module.chunks.items():
        params = frozenset(id(param) for param in chunk.parameters()) - tied
        found.append(ManualGroup(chunk_group(number), params))
    for name in module.children_outside_layers() if mesh.pipe.size > 1 else ():
        # no parameters: the first stage saves its buffers for all
        found.append(ManualGroup(f"outside.{name}", frozenset(), mesh.pipe, 0, name))
    return found


def chunk_group(chunk: int) -> str:
    """Return the name of a chunk's ManualGroup."""
    return f"chunk{chunk}"


def tied_group(key: str) -> str:
    """Return the name of a tied module's ManualGroup."""
    return f"tied.{key}"


class ChunkShards:
    """The sharding actions of one rank's chunks.

    A tied module that several chunks of this rank use is freed and reduced with the last of them.
    """

    def __init__(self, model: ShardedModel, module: PipelineModule, *, every_micro_batch: bool) -> None:
        self._model = model
        self._every_micro_batch = every_micro_batch
        mine = set(module.chunks)
        self._keys = list(module.ties)  # tie number -> key
        self._tied: Mapping[int, list[str]] = {
            chunk: [tied_group(key) for key, chunks in module.ties.items() if chunk in chunks] for chunk in mine
        }
        self._holders = {tied_group(key): mine & set(chunks) for key, chunks in module.ties.items()}
        self._open: set[int] = set()
        self._reduced: set[int] = set()

    def unshard(self, chunk: int) -> None:
        self._open.add(chunk)
        for group in self._groups(chunk):
            self._model.unsharder.unshard_async(group)

    def need(self, chunk: int) -> None:
        for group in self._groups(chunk):
            self._model.unsharder.unshard(group, record=False)

    def reshard(self, chunk: int) -> None:
        self._open.discard(chunk)
        for group in self._groups(chunk):
            if not self._holders.get(group, set()) & self._open:
                self._model.unsharder.reshard(group)

    def backward_done(self, chunk: int) -> None:
        for group in self._groups(chunk):
            self._model.end_pass(group)

    def reduce(self, chunk: int) -> None:
        self._model.reduce(chunk_group(chunk))
        self._reduced.add(chunk)
        for group in self._tied[chunk]:
            if self._every_micro_batch or self._holders[group] <= self._reduced:
                self._model.reduce(group)

    def tied_reduce(self, tie: int) -> None:
        self._model.sum_copies(tied_group(self._keys[tie]))

    def start_step(self) -> None:
        """Forget what was unsharded and reduced in the last step, even if it failed halfway."""
        self._open.clear()
        self._reduced.clear()

    def _groups(self, chunk: int) -> list[str]:
        return [chunk_group(chunk), *self._tied[chunk]]
