"""Layers of a pipeline: described first and built later, only on the ranks that need them; joined
into chunks; timed; and partitioned. Arguments are the same as DeepSpeed's."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zero_trial.comm import agree_on
from zero_trial.errors import ConfigError

_logger = logging.getLogger("zero_trial")


Layer = Any
"""A LayerSpec, a module, or a function of one argument."""


class LayerSpec:
    """A module's class and its arguments: ``LayerSpec(nn.Linear, 8, 4, bias=False)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                "a layer spec is for a class of modules",
                where="LayerSpec",
                got=repr(typename),
                expected="a subclass of torch.nn.Module",
                fix="Put a function into the list of layers directly.",
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(words)})"

    def build(self, log: bool = False) -> nn.Module:
        """Return a new module at each call, on torch's default device."""
        if log:
            _logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the other layers of its ``key``, which may be on other
    stages.

    The first layer builds the module. Each layer calls ``forward_fn(module, input)``, or the module
    if ``forward_fn`` is None. ``tied_weight_attr`` is the dotted name of the shared weights in the
    module.
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
    """Return the facts about a layer for partitioning. Builds a spec on the meta device, without
    memory and random numbers."""
    if isinstance(layer, LayerSpec):
        return LayerFacts(layer.typename.__name__, _trainable(_build_on_meta(layer)))
    if isinstance(layer, nn.Module):
        return LayerFacts(type(layer).__name__, _trainable(layer))
    if not callable(layer):
        raise ConfigError(
            "this is not a layer", where="layers", got=repr(layer), expected="a LayerSpec, a module or a function"
        )
    return LayerFacts(getattr(layer, "__name__", type(layer).__name__), 0)


def tied_chunks(layers: Sequence[Layer], bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return for each key of tied layers the chunks that hold it, in the order of the keys' first
    layers; ``bounds`` as returned by ``partition``."""
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
            "the layer cannot be built on the meta device, where its parameters are counted",
            where=repr(spec),
            got=f"{type(error).__name__}: {error}",
            fix="Make its constructor work without tensor values, or put a built module into the list of layers.",
        ) from error


def _trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


# --- chunks: the built layers of one contiguous part of a pipeline --------------------------------

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class LayerSeeds:
    """Layer i of the model is built after ``function(base + i)``, so that its initial weights do
    not depend on the partition.

    Like DeepSpeed's ``seed_layers``, sets the random state of the whole process, also before each
    layer's forward: micro-batch n (1, 2, ... over all steps) of layer i runs after ``function(n *
    base + i)``, so dropout does not depend on the partition either.
    """

    base: int = 1234
    function: Callable[[int], Any] = torch.manual_seed


@dataclass(frozen=True)
class Recompute:
    """Groups of ``interval`` layers store only their input and are recomputed in backward:
    ``function(run, input)``.

    Layers without trainable parameters are not recomputed; ``classes`` restricts recomputation to
    layers of these class names.
    """

    interval: int
    function: Callable[..., Any]
    classes: tuple[str, ...] | None = None

    def fits(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether these consecutive layers are recomputed, by DeepSpeed's rule."""
        if self.classes is not None:
            return bool(modules) and all(type(module).__name__ in self.classes for module in modules)
        return any(param.requires_grad for module in modules for param in module.parameters())


class Chunk(nn.Module):
    """Layers ``first`` to ``after - 1`` of ``layers``, in sequence; no others are built.

    Parameters have DeepSpeed's names: ``3.weight`` for layer 3 of the whole model,
    ``tied_modules.KEY.weight`` for tied ones. The chunks of one rank share ``tied``, so that each
    weight exists only once. Tied modules on other ranks start with other values; the engine
    synchronizes them before training.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        first: int,
        after: int,
        *,
        tied: nn.ModuleDict | None = None,
        seeds: LayerSeeds | None = None,
        seeds_forward: bool = False,
    ) -> None:
        super().__init__()
        self.first = first
        self.tied_modules = nn.ModuleDict() if tied is None else tied
        self._recompute: Recompute | None = None
        self._micro_batch = 0  # number of the last forward, for seeds
        self._forward_seeds = seeds if seeds_forward else None
        self._modules_of: list[nn.Module | None] = []
        self._calls = [self._add(layers[index], index, seeds) for index in range(first, after)]

    def forward(self, value: Any, micro_batch: int | None = None) -> Any:
        """Run the layers in sequence, with values of any type between them.

        ``micro_batch``: the number that determines the seeds of the forward; default: that of the
        last call plus 1.
        """
        self._micro_batch = self._micro_batch + 1 if micro_batch is None else micro_batch
        recompute, count = self._recompute, len(self._calls)
        step = recompute.interval if recompute is not None and recompute.interval > 0 else count
        for start in range(0, count, max(step, 1)):
            stop = min(start + step, count)
            run = partial(self._run, start, stop, self._micro_batch)
            between = [module for module in self._modules_of[start:stop] if module is not None]
            if recompute is not None and step and torch.is_grad_enabled() and recompute.fits(between):
                value = recompute.function(run, value)
            else:
                value = run(value)
        return value

    @property
    def recomputes(self) -> bool:
        """Return whether some activations are recomputed in backward."""
        return self._recompute is not None and self._recompute.interval > 0

    def set_recompute(self, recompute: Recompute | None) -> None:
        """Set what to recompute from now on; None stores all activations."""
        self._recompute = recompute

    def _run(self, start: int, stop: int, micro_batch: int, value: Any) -> Any:
        seeds = self._forward_seeds
        for index in range(start, stop):
            if seeds is not None and torch.is_grad_enabled():
                seeds.function(seeds.base * micro_batch + self.first + index)
            value = self._calls[index](value)
        return value

    def _add(self, layer: Layer, index: int, seeds: LayerSeeds | None) -> Call:
        """Build and register a layer; return the callable that runs it."""
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


# --- profile: the time of each layer, measured once with an example input -------------------------

ROUNDS = 3


def layer_times(
    layers: Sequence[Layer], example: Any, seeds: LayerSeeds | None, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Measure each layer's forward and backward in seconds; return rank 0's best of three rounds on
    every rank. Collective over the world.

    Builds one layer at a time and keeps none; restores the random state. ``example``: the first
    layer's input, or a function without arguments that returns it.
    """
    if example is None:
        raise ConfigError(
            "a partition by profile needs an example input of the first layer",
            where="PipelineModule(profile_input)",
            fix="Pass one micro-batch's input, or a function that creates it.",
        )
    state = torch.get_rng_state()
    value = example() if callable(example) else example
    times = []
    for index in range(len(layers)):
        chunk = Chunk(layers, index, index + 1, seeds=seeds)
        value, seconds = _measure(chunk, value, clock)
        times.append(seconds)
    torch.set_rng_state(state)
    return agree_on(times)


def _measure(chunk: Chunk, value: Any, clock: Callable[[], float]) -> tuple[Any, float]:
    best = float("inf")
    for _ in range(ROUNDS):
        leaf = tree_map(_as_leaf, value)
        begin = clock()
        output = chunk(leaf)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if tensors:
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
        best = min(best, clock() - begin)
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output), best


def _as_leaf(leaf: Any) -> Any:
    """Return a copy, so that a layer can change it in place."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    return (copy.requires_grad_() * 1) if copy.is_floating_point() else copy


# --- partition: split a list of layers into contiguous parts ---
#
# A partition of n layers into p parts is p + 1 boundaries, as in DeepSpeed: part i is layers
# ``bounds[i]`` to ``bounds[i + 1] - 1``.

_METHODS = "uniform, parameters, type:REGEX or profile"
_WHERE = "PipelineModule partition_method"


@dataclass(frozen=True)
class LayerFacts:
    """Facts about a layer for partitioning: class name, and number of trainable elements."""

    name: str
    elements: int


def partition(method: str, layers: Sequence[LayerFacts], parts: int, times: Sequence[float] | None = None) -> list[int]:
    """Return the boundaries by DeepSpeed's ``partition_method`` (case-insensitive).

    ``uniform`` counts layers, ``parameters`` trainable elements, ``type:REGEX`` the layers whose
    class name contains a match (case is ignored), ``profile`` the measured ``times`` of the layers
    in any unit. Raises ConfigError for an unknown method, or one that cannot be used here.
    """
    kind = method.strip().lower()
    if kind == "uniform":
        return uniform(len(layers), parts)
    if kind == "parameters":
        return balanced([layer.elements for layer in layers], parts)
    if kind.startswith("type:"):
        return balanced(_matches(method.strip()[len("type:") :], layers), parts)
    if kind != "profile":
        raise ConfigError("unknown partition method", where=_WHERE, got=repr(method), expected=_METHODS)
    if times is None or len(times) != len(layers):
        raise ConfigError(
            "a partition by profile needs a measured time for each layer",
            where=_WHERE,
            got="none" if times is None else f"{len(times)} times",
            expected=f"{len(layers)} times",
        )
    return balanced(times, parts)


def uniform(layers: int, parts: int) -> list[int]:
    """Put the same number of layers into each part; the first parts get the remainder."""
    _check(layers, parts)
    size, more = divmod(layers, parts)
    return [index * size + min(index, more) for index in range(parts + 1)]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return the partition without empty parts that minimizes the heaviest part; among those, the
    most even one (least sum of squares).

    Exact, by dynamic programming in O(parts x n^2): first minimize the heaviest part, then find the
    most even partition within that limit.
    """
    _check(len(weights), parts)
    wrong = next((weight for weight in weights if not 0 <= weight < inf), None)
    if wrong is not None:
        raise ConfigError("a layer's weight is not a finite number of at least 0", where=_WHERE, got=wrong)
    sums = [0.0, *accumulate(weights)]
    least = _cut(sums, parts, limit=inf, heaviest=True)[0]
    return _cut(sums, parts, limit=least, heaviest=False)[1]


def _cut(sums: Sequence[float], parts: int, *, limit: float, heaviest: bool) -> tuple[float, list[int]]:
    """Return cost and boundaries of the best partition into parts of at most ``limit``, by heaviest
    part or by sum of squares."""
    count = len(sums) - 1
    # best[n] is the cost of the first n layers in as many parts as rounds so far; back stores where
    # the last of these parts begins.
    best = [0.0] + [inf] * count
    back: list[list[int]] = []
    for _ in range(parts):
        prices, begins = [inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end - 1, -1, -1):
                weight = sums[end] - sums[begin]
                if weight > limit:
                    break  # more layers only increase the weight
                price = max(best[begin], weight) if heaviest else best[begin] + weight * weight
                if price < prices[end]:
                    prices[end], begins[end] = price, begin
        best = prices
        back.append(begins)
    bounds = [count]
    for begins in reversed(back):
        bounds.append(begins[bounds[-1]])
    return best[count], bounds[::-1]


def _matches(pattern: str, layers: Sequence[LayerFacts]) -> list[float]:
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError("not a regular expression", where=_WHERE, got=f"type:{pattern} ({error})") from None
    weights = [1.0 if expression.search(layer.name) else 0.0 for layer in layers]
    if not any(weights):
        names = ", ".join(sorted({layer.name for layer in layers}))
        raise ConfigError("no layer's class matches", where=_WHERE, got=f"type:{pattern}", expected=f"one of {names}")
    return weights


def _check(layers: int, parts: int) -> None:
    if parts < 1 or layers < parts:
        raise ConfigError(
            "every part of a pipeline needs a layer",
            where=_WHERE,
            got=f"{layers} layers for {parts} parts",
            fix="Use fewer pipeline stages or chunks, or more and smaller layers.",
        )
