"""Wiring a pipeline: the mesh's stages, the layers of this rank, the policy, and the plan that follows from it."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero_trial.config.sections import DsConfig
from zero_trial.engine.chunk_shards import domains_of
from zero_trial.engine.pipeline_settings import PipelineSettings, choose_policy, pipeline_settings, price_line, weigh
from zero_trial.engine.wiring import Wiring
from zero_trial.errors import ConfigError
from zero_trial.mesh import Mesh, lanes_if_possible, open_directions
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.placement import Placement
from zero_trial.pipeline.policy import Policy
from zero_trial.pipeline.schedules import RECIPES
from zero_trial.zero.domain import Domain
from zero_trial.zero.plan import ReduceAt

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class PipelineWiring:
    """What a pipeline's engine needs beside that of any engine. ``channel`` sets its messages apart from other engines'."""

    settings: PipelineSettings
    policy: Policy
    price: str  # of schedule and policy, in a line
    domains: tuple[Domain, ...]
    channel: int


def with_stages(config: DsConfig, model: nn.Module) -> DsConfig:
    """``config`` with the number of pipeline stages that the model was made for, where it names none. Raises ConfigError where they differ."""
    if not isinstance(model, PipelineModule):
        if config.mesh.pipe > 1:
            raise ConfigError(
                "only a PipelineModule can be cut into pipeline stages",
                where="mesh.pipe",
                got=f"{config.mesh.pipe} stages for a {type(model).__name__}",
                fix="Make it a zero_trial.PipelineModule, or remove mesh.pipe.",
            )
        return config
    if model.num_stages is None or model.num_stages == config.mesh.pipe:
        return config
    if config.sources.get("mesh.pipe", "default") != "default":
        raise ConfigError(
            "ds_config and the model disagree about the pipeline stages",
            where="mesh.pipe",
            got=config.mesh.pipe,
            expected=f"{model.num_stages}, the num_stages of the PipelineModule",
        )
    return replace(config, mesh=replace(config.mesh, pipe=model.num_stages))


def build_layers(model: PipelineModule, config: DsConfig, mesh: Mesh, *, has_parameters: bool) -> None:
    """Builds this rank's layers as ds_config's schedule wants them. ``has_parameters``: the caller holds parameters of those built so far."""
    settings, stage = pipeline_settings(config), mesh.coordinates["pipe"]
    _check_topology(model, mesh)
    placement = RECIPES[settings.schedule].place(settings.stages, settings.chunks_per_rank)
    method = settings.partition_method or model.partition_method
    same = (model.placement, model.stage_id, model.partition_method) == (placement, stage, method)
    if model.built and not same and has_parameters:
        raise ConfigError(
            "the layers that the optimizer was given are not those that this schedule needs here",
            where="pipeline.schedule",
            got=f"{settings.schedule} with {settings.chunks_per_rank} chunks per rank, partition {method}",
            fix=f"Give PipelineModule(placement=..., partition_method={method!r}) the same, or leave model_parameters out: all train.",
        )
    model.build(
        placement,
        stage,
        partition_method=method,
        activation_checkpoint_interval=settings.activation_checkpoint_interval or None,
    )


def wire_pipeline(
    model: PipelineModule, config: DsConfig, mesh: Mesh, wiring: Wiring, device: torch.device
) -> tuple[Wiring, PipelineWiring]:
    """The policy (all pipeline ranks agree on it), and ``wiring`` with the plan that it means. Collective over the world."""
    settings = pipeline_settings(config)
    own = sum(param.numel() for param in model.parameters() if param.requires_grad)
    sizes = mesh.pipe.gather_json(own, "parameters of the pipeline stages")
    weights = [weigh(size, wiring.policy, mesh.shape.shard) for size in sizes]
    limit = _memory(device)
    choice = choose_policy(settings, wiring.plan, weights, wiring.batch.accumulation, limit)
    price = price_line(settings, choice, wiring.batch.accumulation, mesh.data.size)
    if mesh.rank == 0:
        log.info("%s", price)
    plan = wiring.plan.told(reduce_at=ReduceAt(choice.policy.reduction.value))
    lanes_if_possible(mesh.pipe)
    if device.type == "cuda" and mesh.pipe.size > 1 and model.placement is not None:
        open_directions(mesh, hops_of(model.placement))
    channel = int(mesh.world.gather_json(secrets.randbits(11), "channel")[0])
    domains = tuple(domains_of(model, mesh))
    return replace(wiring, plan=plan), PipelineWiring(settings, choice.policy, price, domains, channel)


def hops_of(placement: Placement) -> list[tuple[int, int]]:
    """(from stage, to stage) of all messages: each border between chunks on two ranks, there and back."""
    borders = dict.fromkeys((a, b) for a, b in pairwise(placement.ranks) if a != b)
    return list(dict.fromkeys([*borders, *((b, a) for a, b in borders)]))


def _memory(device: torch.device) -> int | None:
    """Bytes of the device; None on the host, whose memory all ranks share."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.total_memory)


def _check_topology(model: PipelineModule, mesh: Mesh) -> None:
    topology = model.topology()
    if topology is None or topology.world_size() != mesh.world.size:
        return
    stage = int(topology.get_coord(mesh.rank).pipe)
    if stage != mesh.coordinates["pipe"]:
        raise ConfigError(
            "the topology places this rank at another pipeline stage than the mesh does",
            where="PipelineModule(topology)",
            got=f"rank {mesh.rank} at stage {stage}",
            expected=f"stage {mesh.coordinates['pipe']}",
            fix="Let pipe be the topology's first axis, as in PipeDataParallelTopology.",
        )
