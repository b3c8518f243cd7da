"""The memory plan of a model that is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.planning.compare import Planner
from zero_trial.planning.memory_plan import MemoryPlan
from zero_trial.planning.subject import ModelSubject


def memory_plan(
    model: nn.Module, config: DsConfig | Mapping[str, Any], ranks: int, batch: Any = None, **subject: Any
) -> MemoryPlan:
    """Return what rank 0 of ``ranks`` needs to train ``model`` on micro-batches like ``batch``.

    ``subject``: further arguments of :class:`ModelSubject` (``loss``, ``options``, ``device``).
    """
    settings = config if isinstance(config, DsConfig) else read_ds_config(config)
    return Planner(ModelSubject(model, batch, **subject), settings, ranks).plan()
