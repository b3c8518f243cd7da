"""Curves: a quantity over steps that grows while it is read, and its mean, lowest and highest value
in each pixel of a drawing.

Every chart of the reports and of the board is drawn from these.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import ge
from typing import Any

from zero_trial.report.report_data import Series
from zero_trial.trial.runs.events import is_finite

MOST_POINTS = 600
"""Points of a line in a drawing: a pixel each where the drawing is as wide."""


FORGET_SECONDS = 120.0
"""After which what was read for a page is read again, if no page has asked for it."""


def most_of_each(lines: int) -> int:
    """Return the points of each line where ``lines`` are drawn over each other."""
    return min(MOST_POINTS, max(120, 24_000 // max(lines, 1)))


class Curve:
    """Collects values by step: 16 bytes for each, or 32 where they are means of single steps.

    Values come in any order; of two at one step the later one counts. What is not a finite number
    is left out.
    """

    def __init__(self) -> None:
        self._steps = array("d")
        self._values = array("d")
        self._low: array[float] | None = None
        self._high: array[float] | None = None
        self._drawn: dict[tuple[str, int], Series] = {}
        self._in_order = True

    def __len__(self) -> int:
        self._sort()
        return len(self._steps)

    def add(self, step: Any, value: Any, single: Sequence[float] = ()) -> None:
        """Add a value.

        Args:
            single: values of single steps that ``value`` is the mean of.
        """
        if not is_finite(step) or not is_finite(value):
            return
        self._drawn = {}
        if len(single) > 1 and self._low is None:
            self._low, self._high = array("d", self._values), array("d", self._values)
        if self._steps and step <= self._steps[-1]:
            self._in_order = False
        self._steps.append(step)
        self._values.append(value)
        if self._low is not None and self._high is not None:
            self._low.append(min((*single, value)))
            self._high.append(max((*single, value)))

    def _sort(self) -> None:
        """Bring the values into the order of their steps. It is done before a read and not at each
        value: a file in reverse order would take quadratic time."""
        if not self._in_order:
            self._in_order = True
            last = {step: at for at, step in enumerate(self._steps)}
            order = [last[step] for step in sorted(last)]
            for column in self._columns():
                column[:] = array("d", [column[at] for at in order])

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> None:
        """Add finite values, as many as steps; many that come in order cost little."""
        new = array("d", steps)
        in_order = not self._steps or not new or self._steps[-1] < new[0]
        if self._low is not None or not in_order or any(map(ge, new, new[1:])):
            for step, value in zip(steps, values, strict=True):
                self.add(step, value)
            return
        self._steps += new
        self._values += array("d", values)
        self._drawn = {}

    def _columns(self) -> list[array[float]]:
        return [one for one in (self._steps, self._values, self._low, self._high) if one is not None]

    def rewind(self, step: float) -> None:
        """Remove what is beyond ``step``: a run that starts there again takes it back."""
        self._sort()
        end = bisect_right(self._steps, step)
        for column in self._columns():
            del column[end:]
        self._drawn = {}

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return step and value of the first and of the last; there must be one."""
        self._sort()
        return (self._steps[0], self._values[0]), (self._steps[-1], self._values[-1])

    def best(self, smaller: bool) -> float | None:
        """Return the lowest or the highest value; None if there is none."""
        self._sort()  # of two at one step the later counts
        return (min if smaller else max)(self._values, default=None)

    def series(self, name: str, most: int = MOST_POINTS) -> Series:
        """Return what is drawn: every value, or of many the mean and the bounds in each pixel."""
        drawn = self._drawn.get((name, most))
        if drawn is None:
            drawn = self._drawn[name, most] = self._draw(name, most)
        return drawn

    def _draw(self, name: str, most: int) -> Series:
        self._sort()
        low, high = self._low or self._values, self._high or self._values
        if len(self) > most:
            drawn = _per_pixel(name, self._steps, self._values, low, high, most)
            return replace(drawn, last=self._values[-1])
        bounds = (tuple(low), tuple(high)) if self._low else ((), ())
        return Series(name, tuple(self._steps), tuple(self._values), *bounds)


def curve(pairs: Iterable[tuple[Any, Any]]) -> Curve:
    """Return the curve of pairs of step and value."""
    made = Curve()
    for step, value in pairs:
        made.add(step, value)
    return made


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most ``most`` points, each the mean, the lowest and the highest of a pixel."""
    if len(series) <= most:
        return series
    low, high = series.low or series.values, series.high or series.values
    drawn = _per_pixel(series.name, series.steps, series.values, low, high, most)
    return replace(drawn, last=series.values[-1] if series.last is None else series.last)


def _per_pixel(
    name: str,
    steps: Sequence[float],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    pixels: int,
) -> Series:
    """Return one point for each of the equal spans of steps that has values."""
    first = steps[0]
    width = (steps[-1] - first) / pixels
    found: list[tuple[float, float, float, float]] = []
    start = 0
    while start < len(steps):
        pixel = min(int((steps[start] - first) / width), pixels - 1)
        end = len(steps) if pixel == pixels - 1 else bisect_left(steps, first + (pixel + 1) * width, start + 1)
        span = slice(start, end)
        count = end - start
        mean = sum(values[span]) / count
        found.append((sum(steps[span]) / count, mean, min(low[span]), max(high[span])))
        start = end
    at, means, lows, highs = zip(*found, strict=True)
    return Series(name, at, means, lows, highs)


def finite(values: Any) -> list[float]:
    """Return the finite numbers of a list; none of anything else."""
    return [float(value) for value in values if is_finite(value)] if isinstance(values, list) else []
