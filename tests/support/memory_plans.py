"""The memory plan of a model that is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.memory_plan import MemoryPlan
from zero_trial.planning.planner import Loss, Planner, model_subject
from zero_trial.planning.state_bytes import TrainedModel


def memory_plan(
    model: nn.Module, config: DsConfig | Mapping[str, Any], ranks: int, batch: Any = None, **more: Any
) -> MemoryPlan:
    """Return what rank 0 of ``ranks`` needs to train ``model`` on micro-batches like ``batch``.

    ``more``: ``loss``, ``options``, ``device``.
    """
    return planner_of(model, config, ranks, batch, **more).plan()


def planner_of(
    model: nn.Module,
    config: DsConfig | Mapping[str, Any],
    ranks: int,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Planner:
    """Return what plans a model alone."""
    settings = config if isinstance(config, DsConfig) else read_ds_config(config)
    trained = TrainedModel(Blueprint(model, options, device), settings)
    return Planner(model_subject(trained, batch, loss), settings, ranks)
