"""The points of a search: a random draw, the points of a grid by number, and those that a check
looks at.

The master, ``zero-trial check`` and ``zero-trial config`` ask the same functions.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from zero_trial.errors import ConfigError
from zero_trial.experiment.hyperparameters import find_ranges, is_const


class RandomNumbers(Protocol):
    """Random numbers for `sample`."""

    def below(self, count: int) -> int:
        """Return an integer, 0 to count - 1."""

    def unit(self) -> float:
        """Return a number from 0 to below 1."""


def sample(space: Mapping[str, Any], numbers: RandomNumbers) -> dict[str, Any]:
    """Return ``space`` with every range replaced by a value.

    Names are visited in the order of their bytes, whatever their order in the YAML. The top level
    is a map of names even if one of them is ``type``, as in Determined.
    """
    found = sorted(find_ranges(space), key=lambda pair: pair[0])
    return _with(space, (), {path: _draw(spec, numbers) for path, spec in found})


def _draw(spec: Mapping[str, Any], numbers: RandomNumbers) -> Any:
    match spec["type"]:
        case "categorical":
            return copy.deepcopy(spec["vals"][numbers.below(len(spec["vals"]))])
        case "int":
            return spec["minval"] + numbers.below(spec["maxval"] - spec["minval"] + 1)
        case "double":
            return as_sent(_uniform(spec, numbers))
        case _:  # log
            return as_sent(power(float(spec["base"]), _uniform(spec, numbers)))


def as_sent(value: Any) -> Any:
    """Return ``value`` with its numbers as a trial of a cluster gets them: the JSON of Go has no
    1.0, and a trial gets 1."""
    if isinstance(value, dict):
        return {key: as_sent(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_sent(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def _uniform(spec: Mapping[str, Any], numbers: RandomNumbers) -> float:
    low, high = float(spec["minval"]), float(spec["maxval"])
    return low + (high - low) * numbers.unit()


def power(base: float, exponent: float) -> float:
    """Return ``base``, which is positive, to the power of ``exponent``: to the last bit the number
    that a Determined master on an x86-64 processor computes.

    Its mathematics library multiplies squares of the base for the whole part of the exponent and
    adds ``exp(rest * log(base))``, with |rest| at most 1/2. The result differs from the correctly
    rounded one by up to two units in the last place.
    """
    if abs(exponent) == 0.5:
        return math.sqrt(base) if exponent > 0 else 1.0 / math.sqrt(base)
    rest, whole = math.modf(abs(exponent))
    if rest > 0.5:
        rest, whole = rest - 1.0, whole + 1.0
    result = _exp(rest * math.log(base)) if rest else 1.0
    factor, bits = math.frexp(base)  # base = factor 2^bits, and so for its squares
    shift, left = 0, int(whole)
    while left:
        if left & 1:
            result, shift = result * factor, shift + bits
        factor, bits = factor * factor, 2 * bits
        if factor < 0.5:
            factor, bits = 2.0 * factor, bits - 1
        left >>= 1
    return math.ldexp(result, shift) if exponent >= 0 else math.ldexp(1.0 / result, -shift)


_LN2 = (0.69314718055966295651160180568695068359375, 0.28235290563031577122588448175013436025525412068e-12)
"""ln 2 in two parts; the product of the first with a small integer is exact."""

_TAYLOR = tuple(1.0 / math.factorial(order) for order in range(8, 0, -1))


def _exp(number: float) -> float:
    """Return e to the power of ``number``.

    N. Shibata, "Efficient evaluation methods of elementary functions suitable for SIMD
    computation", 2010: exp(16 r) 2^k with a Taylor series for y = exp(r) - 1, doubled four times by
    exp(2 r) - 1 = y (y + 2). Every addition to a product is fused.
    """
    twos = round(number * math.log2(math.e))
    rest = number
    for part in _LN2:
        rest = _fused(-twos, part, rest)
    rest /= 16.0
    series = _TAYLOR[0]
    for term in _TAYLOR[1:]:
        series = _fused(series, rest, term)
    y = rest * series
    for _ in range(3):
        y *= y + 2.0
    return math.ldexp(_fused(y, y + 2.0, 1.0), twos)


def _fused(a: float, b: float, c: float) -> float:
    """Return a b + c, rounded once: the quotient of two integers is."""
    (x, under_x), (y, under_y), (z, under_z) = a.as_integer_ratio(), b.as_integer_ratio(), c.as_integer_ratio()
    return (x * y * under_z + z * under_x * under_y) / (under_x * under_y * under_z)


# The points of a grid, by number: the cartesian product of the axes, which is never made as a
# whole.


Path = tuple[str, ...]

MOST_POINTS = 1_000_000
"""A grid that is larger than this is a slip: it would not end, and its axes would fill the
memory."""


@dataclass(frozen=True)
class Grid:
    """Axes in alphabetical order of their paths; the last axis runs fastest."""

    space: Mapping[str, Any]
    axes: tuple[tuple[Path, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, space: Mapping[str, Any]) -> Grid:
        """Return the grid of ``space``. Raises ConfigError for a range without a count, and for a
        grid of more than ``MOST_POINTS``.
        """
        found = sorted(find_ranges(space), key=lambda pair: pair[0])
        grid = cls(space, tuple((path, axis_values(spec)) for path, spec in found))
        if grid.size > MOST_POINTS:
            raise ConfigError("the grid has too many points", got=grid.size, expected=f"at most {MOST_POINTS}")
        return grid

    @property
    def size(self) -> int:
        """Return how many points there are."""
        return math.prod(len(values) for _, values in self.axes)

    def values(self, number: int) -> dict[Path, Any]:
        """Return the value of every axis at point ``number``, 0 to size - 1."""
        chosen: dict[Path, Any] = {}
        for path, values in reversed(self.axes):
            number, index = divmod(number, len(values))
            chosen[path] = values[index]
        return {path: chosen[path] for path, _ in self.axes}

    def point(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of point ``number``, 0 to size - 1."""
        return _with(self.space, (), self.values(number))


def axis_values(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return ``count`` values from minval to maxval, both included, evenly spaced (for log: in the
    exponent); a count of 1 is the middle.

    An int axis is rounded, halves away from zero, and has at most maxval - minval + 1 values.
    """
    if spec["type"] == "categorical":
        return tuple(spec["vals"])
    if not isinstance(spec.get("count"), int):
        raise ConfigError("grid search is in use but count was not provided", got=dict(spec), fix="Add count: 5.")
    low, high, count = spec["minval"], spec["maxval"], spec["count"]
    if spec["type"] == "int":
        count = min(count, high - low + 1)
    if count > MOST_POINTS:
        raise ConfigError("the grid has too many points", got=count, expected=f"at most {MOST_POINTS}")
    steps = max(count - 1, 1)
    even = [(low + high) / 2] if count == 1 else [low + (high - low) * number / steps for number in range(count)]
    return tuple(_written(spec, value) for value in even)


def _written(spec: Mapping[str, Any], value: float) -> Any:
    if spec["type"] == "log":
        return as_sent(power(float(spec["base"]), value))
    return int(math.copysign(math.floor(abs(value) + 0.5), value)) if spec["type"] == "int" else as_sent(float(value))


def _with(section: Mapping[str, Any], above: Path, chosen: Mapping[Path, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name, spec in section.items():
        path = (*above, name)
        if path in chosen:
            whole[name] = copy.deepcopy(chosen[path])
        elif is_const(spec):
            whole[name] = copy.deepcopy(spec.get("val"))
        else:
            whole[name] = _with(spec, path, chosen) if isinstance(spec, Mapping) else copy.deepcopy(spec)
    return whole


# The points that a check looks at.


@dataclass(frozen=True)
class Point:
    """One set of hyperparameters: the chosen ``values`` by dotted name, and the whole with them in
    place.
    """

    number: int
    values: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Space:
    """``points`` are those to look at; ``total`` is how many there are, None where they cannot be
    counted.
    """

    points: tuple[Point, ...]
    total: int | None

    @property
    def complete(self) -> bool:
        return self.total == len(self.points)


def explore(hyperparameters: Mapping[str, Any], searcher: str, most: int, seed: int = 0) -> Space:
    """Return the points of a search by ``searcher``, ``most`` at most.

    Pure: the same seed gives the same points.

    A grid's points are those that the master starts, in its order. A sample of another search holds
    the ends of every range and, as far as ``most`` allows, every value of a categorical. Raises
    ConfigError as ``Grid.of`` does.
    """
    axes = dict(find_ranges(hyperparameters))
    if not axes:
        return Space((Point(1, {}, hyperparameters),), 1)
    rng = random.Random(seed)
    if searcher == "grid":
        grid = Grid.of(hyperparameters)
        numbers = range(grid.size) if grid.size <= most else sorted(rng.sample(range(grid.size), most))
        return Space(_points(hyperparameters, [grid.values(number) for number in numbers]), grid.size)
    columns = [_sampled(spec, most, rng) for spec in axes.values()]
    unlike = {repr(row): dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True)}
    whole = math.prod(len(spec["vals"]) if spec["type"] == "categorical" else math.inf for spec in axes.values())
    return Space(_points(hyperparameters, list(unlike.values())), len(unlike) if whole == len(unlike) else None)


def _sampled(spec: Mapping[str, Any], count: int, rng: random.Random) -> list[Any]:
    """Return ``count`` values of one axis: the ends first, then at random; a categorical goes
    round.
    """
    if spec["type"] == "categorical":
        values = list(spec["vals"])
        rng.shuffle(values)
        return [values[number % len(values)] if number < len(values) else rng.choice(values) for number in range(count)]
    low, high = spec["minval"], spec["maxval"]
    inner = [rng.randint(low, high) if spec["type"] == "int" else rng.uniform(low, high) for _ in range(count)]
    return [_written(spec, value) for value in [low, high, *inner][:count]]


def _points(hyperparameters: Mapping[str, Any], rows: list[dict[Path, Any]]) -> tuple[Point, ...]:
    names = [{".".join(path): value for path, value in row.items()} for row in rows]
    wholes = [_with(hyperparameters, (), row) for row in rows]
    return tuple(Point(number, *pair) for number, pair in enumerate(zip(names, wholes, strict=True), 1))
