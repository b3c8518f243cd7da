"""A chunk: the built layers of one contiguous part of a pipeline, as a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_trial.pipeline.specs import Layer, LayerSpec, TiedLayerSpec

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class LayerSeeds:
    """Layer i of the model is built after ``function(base + i)``, so that its first weights are the same however the model is cut.

    It sets the random state of the whole process, as DeepSpeed's ``seed_layers`` does; and, as there, again before each layer's forward:
    micro-batch n (1, 2, ... through all steps) of layer i runs after ``function(n * base + i)``, so dropout is the same however the model is cut.
    """

    base: int = 1234
    function: Callable[[int], Any] = torch.manual_seed


@dataclass(frozen=True)
class Recompute:
    """``interval`` layers at a time keep their input only and run again in backward: ``function(run, input)``.

    Layers without parameters to train are not worth it; ``classes`` names those that are, if it is given.
    """

    interval: int
    function: Callable[..., Any]
    classes: tuple[str, ...] | None = None

    def fits(self, modules: Sequence[nn.Module]) -> bool:
        """Whether a run of layers is to be recomputed: DeepSpeed's rule."""
        if self.classes is not None:
            return bool(modules) and all(type(module).__name__ in self.classes for module in modules)
        return any(param.requires_grad for module in modules for param in module.parameters())


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
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        self.first = first
        self.tied_modules = nn.ModuleDict() if tied is None else tied
        self.recompute = recompute
        self.micro_batch = 0  # forwards so far, for the seeds; who runs several chunks says it before each
        self.forward_seeds: LayerSeeds | None = None
        self._modules_of: list[nn.Module | None] = []
        self._calls = [self._add(layers[index], index, seeds) for index in range(first, after)]

    def forward(self, value: Any) -> Any:
        """The layers' composition; what goes between them is theirs to say."""
        recompute, count = self.recompute, len(self._calls)
        step = recompute.interval if recompute is not None and recompute.interval > 0 else count
        for start in range(0, count, max(step, 1)):
            stop = min(start + step, count)
            run = partial(self._run, start, stop, self.micro_batch)
            if (
                recompute is not None
                and step
                and torch.is_grad_enabled()
                and recompute.fits(self._between(start, stop))
            ):
                value = recompute.function(run, value)
            else:
                value = run(value)
        return value

    @property
    def recomputes(self) -> bool:
        """Some of its activations are made again in backward."""
        return self.recompute is not None and self.recompute.interval > 0

    def _run(self, start: int, stop: int, micro_batch: int, value: Any) -> Any:
        seeds = self.forward_seeds
        for index in range(start, stop):
            if seeds is not None and torch.is_grad_enabled():
                seeds.function(seeds.base * micro_batch + self.first + index)
            value = self._calls[index](value)
        return value

    def _between(self, start: int, stop: int) -> list[nn.Module]:
        return [module for module in self._modules_of[start:stop] if module is not None]

    def _add(self, layer: Layer, index: int, seeds: LayerSeeds | None) -> Call:
        """Build and register a layer: what is called for it."""
        if seeds is not None:
            seeds.function(seeds.base + index)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            self._modules_of.append(module)
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        self._modules_of.append(layer if isinstance(layer, nn.Module) else None)
        call: Call = layer
        return call
