"""Synthetic learning curves: a loss over the fraction of a training, different for every trial and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

Curve: TypeAlias = Callable[[float], float]
"""Fraction of the training (0 to 1) -> loss."""

_START = 5.0


def power(seed: int) -> Curve:
    """A power law from 5 down to a final loss between 1 and 3: who is good early is mostly good in the end."""
    stream = random.Random(seed)
    final, exponent = stream.uniform(1.0, 3.0), stream.uniform(0.8, 1.2)
    scale = (_START - final) / (1.0 - 100.0**-exponent)
    return lambda fraction: final + scale * ((1.0 + 99.0 * fraction) ** -exponent - 100.0**-exponent)


def crossing(seed: int) -> Curve:
    """The slower a trial starts, the better it ends: the hardest case for stopping early."""
    quality = random.Random(seed).random()
    return lambda fraction: _START - (1.0 + 3.0 * quality) * fraction ** (0.25 + 2.0 * quality)


def noise(seed: int) -> Curve:
    """A loss that says nothing about the trial: what the search decides by chance alone."""
    return lambda fraction: random.Random(f"{seed}/{fraction:.6f}").uniform(1.0, _START)


CURVES: Mapping[str, Callable[[int], Curve]] = MappingProxyType({"power": power, "crossing": crossing, "noise": noise})
