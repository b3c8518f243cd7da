"""Partition: where a list of layers is cut into contiguous parts, one for each chunk of a pipeline.
Pure.

A partition of n layers in p parts is p + 1 boundaries, as DeepSpeed has it: part i is layers
``bounds[i]`` to ``bounds[i + 1] - 1``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from zero_trial.errors import ConfigError

_METHODS = "uniform, parameters, type:REGEX or profile"
_WHERE = "PipelineModule partition_method"


@dataclass(frozen=True)
class LayerFacts:
    """What partitioning knows of a layer: its class's (or function's) name, and its trainable
    elements."""

    name: str
    elements: int


def partition(method: str, layers: Sequence[LayerFacts], parts: int, times: Sequence[float] | None = None) -> list[int]:
    """Return the boundaries by DeepSpeed's ``partition_method``, in any case.

    ``uniform`` counts layers, ``parameters`` trainable elements, ``type:REGEX`` the layers whose
    name the expression is found in (case does not matter), ``profile`` the measured ``times`` of
    the layers in any unit. Raises ConfigError for another method or where it cannot be used.
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
    """Put equally many layers into each part; the first parts get one more where they do not divide
    evenly."""
    _check(layers, parts)
    size, more = divmod(layers, parts)
    return [index * size + min(index, more) for index in range(parts + 1)]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return the cut whose heaviest part is as light as can be, no part being empty; among such
    cuts the most even one (least sum of squares).

    Exact, by dynamic programming in O(parts x n^2): first the least heaviest part, then the most
    even cut within it.
    """
    _check(len(weights), parts)
    wrong = next((weight for weight in weights if not 0 <= weight < inf), None)
    if wrong is not None:
        raise ConfigError("a layer's weight is not a finite number of at least 0", where=_WHERE, got=wrong)
    sums = [0.0, *accumulate(weights)]
    least = _cut(sums, parts, limit=inf, heaviest=True)[0]
    return _cut(sums, parts, limit=least, heaviest=False)[1]


def _cut(sums: Sequence[float], parts: int, *, limit: float, heaviest: bool) -> tuple[float, list[int]]:
    """Return the best cut in parts of at most ``limit``, by its heaviest part or by its sum of
    squares: its price and its boundaries."""
    count = len(sums) - 1
    # best[n] is the price of the first n layers in as many parts as rounds so far; back has where
    # the last of these parts begins.
    best = [0.0] + [inf] * count
    back: list[list[int]] = []
    for _ in range(parts):
        prices, begins = [inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end - 1, -1, -1):
                weight = sums[end] - sums[begin]
                if weight > limit:
                    break  # and more so with further layers
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
