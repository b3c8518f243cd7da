"""A pipeline's parts without values: the layers of every stage, built where they cost no memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from zero_trial.engine.pipeline_settings import PipelineSettings
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.placement import Placement
from zero_trial.pipeline.schedules import RECIPES
from zero_trial.planning.blueprint import Blueprint


@dataclass(frozen=True)
class Parts:
    """``stages[r]`` is what pipeline rank r holds, a ModuleDict of its chunks by number; ``whole`` has the chunks of all.

    ``bounds``: chunk c is layers ``bounds[c]`` to ``bounds[c + 1] - 1``. ``ties``: groups of chunks that share weights.
    """

    placement: Placement
    stages: tuple[Blueprint, ...]
    whole: Blueprint
    bounds: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]  # trainable, of each pipeline rank
    parameters: int  # of the whole model, what is tied once
    loss_fn: Any

    def layers(self, rank: int) -> str:
        """``0-3`` or ``0-1,4-5``: the layers of a pipeline rank."""
        runs = [(self.bounds[chunk], self.bounds[chunk + 1] - 1) for chunk in self.placement.of(rank)]
        return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def parts_of(model: PipelineModule, settings: PipelineSettings, device: torch.device | str = "cpu") -> Parts:
    """The parts that the run's ranks will build; ``model`` stays as it is. A partition by profile is measured here, with real layers."""
    placement = RECIPES[settings.schedule].place(settings.stages, settings.chunks_per_rank)
    method = settings.partition_method or model.partition_method
    built = []
    for rank in range(placement.stages):
        stage = model.unbuilt()
        with nullcontext() if method.strip().lower() == "profile" else torch.device("meta"):
            stage.build(
                placement,
                rank,
                partition_method=method,
                activation_checkpoint_interval=settings.activation_checkpoint_interval or None,
            )
        built.append(stage)
    chunks = [nn.ModuleDict({str(number): chunk for number, chunk in stage.chunks.items()}) for stage in built]
    whole = nn.ModuleDict(dict(chain.from_iterable(stage.items() for stage in chunks)))
    return Parts(
        placement=placement,
        stages=tuple(Blueprint(stage, device=device) for stage in chunks),
        whole=Blueprint(whole, device=device),
        bounds=tuple(built[0].parts),
        ties=tuple(built[0].ties.values()),
        elements=tuple(_trainable(stage) for stage in chunks),
        parameters=model.total_parameters,
        loss_fn=model.loss_fn,
    )


def _trainable(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)
