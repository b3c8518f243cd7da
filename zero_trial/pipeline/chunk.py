"""A chunk: the built layers of one contiguous part of a pipeline, as a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_trial.pipeline.specs import Layer, LayerSpec, TiedLayerSpec


@dataclass(frozen=True)
class LayerSeeds:
    """Layer i of the model is built after ``function(base + i)``, so that its first weights are the same however the model is cut.

    It sets the random state of the whole process, as DeepSpeed's ``seed_layers`` does.
    """

    base: int = 1234
    function: Callable[[int], Any] = torch.manual_seed


class Chunk(nn.Module):
    """Layers ``first`` to ``after - 1`` of ``layers``, one after the other; the others are not built.

    Parameters have DeepSpeed's names: ``3.weight`` for layer 3 of the whole model, ``tied_modules.KEY.weight`` for tied ones. ``tied`` is
    shared by the chunks of one rank, so that a weight is there once. Tied modules of other ranks start apart: whoever trains a pipeline
    makes them alike first.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        first: int,
        after: int,
        *,
        tied: nn.ModuleDict | None = None,
        seeds: LayerSeeds | None = None,
    ) -> None:
        super().__init__()
        self.first = first
        self.tied_modules = nn.ModuleDict() if tied is None else tied
        self._calls = [self._add(layers[index], index, seeds) for index in range(first, after)]

    def forward(self, value: Any) -> Any:
        """The layers' composition; what goes between them is theirs to say."""
        for call in self._calls:
            value = call(value)
        return value

    def _add(self, layer: Layer, index: int, seeds: LayerSeeds | None) -> Callable[[Any], Any]:
        """Build and register a layer: what is called for it."""
        if seeds is not None:
            seeds.function(seeds.base + index)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        call: Callable[[Any], Any] = layer
        return call
