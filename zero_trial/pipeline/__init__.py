"""Pipelines: schedules as data, the passes that add messages and sharding to them, the simulator
that verifies them, and the executor that runs them.

Names that need torch are loaded on first use: drawing a schedule does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_trial.pipeline.layers import LayerSpec, TiedLayerSpec
    from zero_trial.pipeline.module import (
        PipeDataParallelTopology,
        PipelineModule,
        PipeModelDataParallelTopology,
        ProcessTopology,
    )

_PLACES = {
    "PipelineModule": "module",
    "LayerSpec": "layers",
    "TiedLayerSpec": "layers",
    "PipeDataParallelTopology": "module",
    "PipeModelDataParallelTopology": "module",
    "ProcessTopology": "module",
}

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'zero_trial.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"zero_trial.pipeline.{_PLACES[name]}"), name)
