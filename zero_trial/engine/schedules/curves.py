"""Learning rate as a pure function of the iteration, with DeepSpeed 0.19.8's arithmetic.

``iteration`` counts scheduler steps: -1 before the first, then 0, 1, 2 ... A curve gives one lr per parameter group. As
in DeepSpeed the first optimizer step runs at iteration -1 and the second at 0, which for the warmups is the minimum
twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

Momenta = list[tuple[float, float]]


class WarmupType(Enum):
    """How the warmup rises: ``log`` fast first, ``linear`` evenly."""

    LOG = "log"
    LINEAR = "linear"


class Curve(Protocol):
    """What a scheduler steps along."""

    def lrs(self, iteration: int) -> list[float]:
        """One learning rate per parameter group."""

    def betas(self, iteration: int) -> Momenta | None:
        """One pair of betas per parameter group; None leaves the optimizer's own."""


def warmup_factor(iteration: int, num_steps: int, kind: WarmupType) -> float:
    """0 at iteration 0, 1 at ``num_steps`` (linear) or one before it (log: log(i + 1) / log(num_steps)); num_steps >=
    2."""
    if kind is WarmupType.LOG:
        return (1.0 / math.log(num_steps)) * math.log(iteration + 1)
    return iteration / num_steps


@dataclass(frozen=True)
class Warmup:
    """From ``min_lrs`` to ``max_lrs`` in ``num_steps``, then constant; or, with ``total_steps``, linear to 0 there."""

    min_lrs: Sequence[float]
    max_lrs: Sequence[float]
    num_steps: int
    kind: WarmupType = WarmupType.LOG
    total_steps: int | None = None

    def factor(self, iteration: int) -> float:
        """Where between minimum (0) and maximum (1) the lr is, from iteration 0 on."""
        if iteration < self.num_steps:
            return warmup_factor(iteration, self.num_steps, self.kind)
        if self.total_steps is None:
            return 1.0
        return max(0.0, float(self.total_steps - iteration) / float(max(1.0, self.total_steps - self.num_steps)))

    def lrs(self, iteration: int) -> list[float]:
        if iteration < 0:
            return list(self.min_lrs)
        factor = self.factor(iteration)
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def betas(self, iteration: int) -> Momenta | None:
        return None


@dataclass(frozen=True)
class WarmupCosine:
    """Ratios of each group's own lr: ``min_ratio`` to 1 in ``num_steps``, then half a cosine down to ``end_ratio``.

    Loshchilov & Hutter 2017, equation 5, without restarts. Before the first scheduler step the lr is 0.
    """

    own_lrs: Sequence[float]
    num_steps: int
    total_steps: int
    min_ratio: float = 0.0
    end_ratio: float = 1e-4
    kind: WarmupType = WarmupType.LOG

    def ratio(self, iteration: int) -> float:
        """The factor on each group's own lr."""
        if iteration < 0:
            return 0.0
        if iteration < self.num_steps:
            return self.min_ratio + warmup_factor(iteration, self.num_steps, self.kind) * (1.0 - self.min_ratio)
        progress = min(1.0, (iteration - self.num_steps + 1) / max(1, self.total_steps - self.num_steps))
        return max(0.0, self.end_ratio + (1.0 - self.end_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def lrs(self, iteration: int) -> list[float]:
        ratio = self.ratio(iteration)
        return [lr * ratio for lr in self.own_lrs]

    def betas(self, iteration: int) -> Momenta | None:
        return None


@dataclass(frozen=True)
class RangeTest:
    """Ever rising lr, to find where training breaks (Smith 2018, section 4.1): min * (1 + rate * steps / step_size)."""

    min_lrs: Sequence[float]
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def lrs(self, iteration: int) -> list[float]:
        interval = float(iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lrs]

    def betas(self, iteration: int) -> Momenta | None:
        return None


@dataclass(frozen=True)
class Cycle:
    """One rise and one fall in ``first_size`` and ``second_size`` steps, optionally in stairs."""

    first_size: float = 2000.0
    second_size: float = 2000.0
    first_stairs: int = 0
    second_stairs: int = 0

    @property
    def size(self) -> float:
        return self.first_size + self.second_size

    def height(self, iteration: int) -> float:
        """0 at the foot, 1 at the peak; periodic."""
        step, ratio = iteration + 1, self.first_size / self.size
        x = 1.0 + step / self.size - math.floor(1 + step / self.size)
        rising = x <= ratio
        stairs = self.first_stairs if rising else self.second_stairs
        if stairs > 0:
            return math.floor(self._stair(step % self.size, stairs)) / stairs
        return x / ratio if rising else (x - 1) / (ratio - 1)

    def _stair(self, step: float, stairs: int) -> float:
        # from the whole step, not from the height: rounding just below a stair would lose a whole one
        if step <= self.first_size:
            return step * stairs / self.first_size
        return (self.size - step) * stairs / self.second_size


@dataclass(frozen=True)
class OneCycle:
    """lr up and down once while the momentum goes down and up, then decay (Smith 2018, section 4).

    ``momentum`` is None (left alone) or (min, max, decay rate) of beta1; beta2 is 0.99 then, as in DeepSpeed.
    """

    groups: int
    cycle: Cycle
    min_lr: float
    max_lr: float
    decay_lr_rate: float = 0.0
    decay_step_size: float = 0.0
    momentum: tuple[float, float, float] | None = None

    BETA2 = 0.99

    def lrs(self, iteration: int) -> list[float]:
        return [self._lr(iteration)] * self.groups

    def _lr(self, iteration: int) -> float:
        if iteration < 0:
            return self.min_lr
        if iteration < self.cycle.size:
            return self.min_lr + (self.max_lr - self.min_lr) * self.cycle.height(iteration)
        return self.min_lr / self._decay(iteration, self.decay_lr_rate)

    def betas(self, iteration: int) -> Momenta | None:
        if self.momentum is None:
            return None
        low, high, decay_rate = self.momentum
        if iteration < 0:
            beta1 = low
        elif iteration < self.cycle.size:
            beta1 = high - (high - low) * self.cycle.height(iteration)
        else:
            beta1 = high * self._decay(iteration, decay_rate)
        return [(beta1, self.BETA2)] * self.groups

    def _decay(self, iteration: int, rate: float) -> float:
        """After the cycle: 1 + rate * intervals of ``decay_step_size`` steps; a size of 0 means no decay."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((iteration - self.cycle.size + 1) / self.decay_step_size)
