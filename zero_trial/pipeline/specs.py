"""Layer specs: layers that are described now and built later, only where they are needed. DeepSpeed's arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.pipeline.partition import LayerFacts

_logger = logging.getLogger("zero_trial")

Layer = Any
"""A LayerSpec, a module, or a function of one argument."""


class LayerSpec:
    """A module's class and the arguments to build it with: ``LayerSpec(nn.Linear, 8, 4, bias=False)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                "a layer spec is for a class of modules",
                where="LayerSpec",
                got=repr(typename),
                expected="a subclass of torch.nn.Module",
                fix="A function goes into the list of layers as it is.",
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(words)})"

    def build(self, log: bool = False) -> nn.Module:
        """The module, made anew by each call, on torch's default device."""
        if log:
            _logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the others of its ``key``, which may be on other pipeline stages.

    The first one builds the module; each calls ``forward_fn(module, input)``, or the module where that is None. ``tied_weight_attr`` names the
    shared weights, dotted from the module.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def layer_facts(layer: Layer) -> LayerFacts:
    """What partitioning needs of a layer. A spec is built on the meta device: without memory, and without drawing random numbers."""
    if isinstance(layer, LayerSpec):
        return LayerFacts(layer.typename.__name__, _trainable(_build_on_meta(layer)))
    if isinstance(layer, nn.Module):
        return LayerFacts(type(layer).__name__, _trainable(layer))
    if not callable(layer):
        raise ConfigError(
            "this is no layer", where="layers", got=repr(layer), expected="a LayerSpec, a module or a function"
        )
    return LayerFacts(getattr(layer, "__name__", type(layer).__name__), 0)


def tied_chunks(layers: Sequence[Layer], bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """For each key of tied layers the chunks that hold it, in the order of the keys' first layers; ``bounds`` as ``partition`` gives them."""
    found: dict[str, set[int]] = {}
    for chunk, (first, after) in enumerate(pairwise(bounds)):
        for layer in layers[first:after]:
            if isinstance(layer, TiedLayerSpec):
                found.setdefault(layer.key, set()).add(chunk)
    return {key: tuple(sorted(chunks)) for key, chunks in found.items()}


def _build_on_meta(spec: LayerSpec) -> nn.Module:
    try:
        with torch.device("meta"):
            return spec.build()
    except Exception as error:  # whatever the layer's constructor raises
        raise ConfigError(
            "the layer cannot be built on the meta device, where layers are counted",
            where=repr(spec),
            got=f"{type(error).__name__}: {error}",
            fix="Make its constructor work without values, or put a built module into the list of layers.",
        ) from error


def _trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
