"""Scales: from a value to a place between 0 and 1 along an axis, and the round values that get a label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.report.data import Axis
from zero_trial.report.numbers import count, number, plain

LOG_RATIO = 50.0  # values that lie further apart than this are told apart on a logarithmic scale only


@dataclass(frozen=True)
class Tick:
    """A label at a place."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """``low`` is at 0 and ``high`` at 1; ``choices`` instead of numbers stand at equal distances."""

    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[str, ...] = ()

    def place(self, value: Any) -> float | None:
        """Where a value is, cut to [0, 1]; None for one that is not on the scale."""
        if self.choices:
            return self._of_choice(plain(value))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        if self.log and value <= 0:
            return None
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def ticks(self, most: int = 5) -> tuple[Tick, ...]:
        """Round values within the scale, about ``most`` of them, evenly to the eye."""
        if self.choices:
            return tuple(Tick(self._of_choice(choice) or 0.0, choice) for choice in self.choices)
        values = _log_values(self.low, self.high, most) if self.log else _linear_values(self.low, self.high, most)
        return tuple(Tick(self.place(value) or 0.0, tick_label(value)) for value in values)

    def _of_choice(self, name: str) -> float | None:
        if name not in self.choices:
            return None
        if len(self.choices) == 1:
            return 0.5
        # Not at the very ends, where handles and other labels stand.
        return 0.06 + 0.88 * self.choices.index(name) / (len(self.choices) - 1)


def fit(values: Iterable[float], *, log: bool | None = None, margin: float = 0.04) -> Scale:
    """The scale that shows all values with a little air. ``log`` None: logarithmic where they are positive and far apart."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return Scale()
    low, high = min(found), max(found)
    if log is None:
        log = low > 0 and high / low >= LOG_RATIO
    if log and low > 0:
        air = (high / low) ** margin if high > low else 2.0
        return Scale(low / air, high * air, log=True)
    air = (high - low) * margin if high > low else abs(high) * 0.5 or 0.5
    return Scale(low - air, high + air)


def fit_axis(axis: Axis, values: Sequence[Any]) -> Scale:
    """The scale of a swept leaf over the values that it took."""
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if axis.choices or len(numbers) < len(values):
        extra = sorted({plain(value) for value in values} - set(axis.choices))
        return Scale(choices=(*axis.choices, *extra))
    return fit(numbers, log=axis.log or None)


def tick_label(value: float) -> str:
    """A round value, short: 20k, 0.5, 1e−5."""
    return count(value) if 10_000 <= abs(value) < 1e12 else number(value, 6)


def _linear_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_values(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there is room, thinned where there is not."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(values) <= most + 1:
            return values if len(values) >= 2 else _linear_values(low, high, most)
    every = math.ceil(len(values) / most)
    return values[::every]
